"""One engine process as the proxy knows it: where it is, what it said of itself, whether it may get requests.

Changes of health and facts are plain functions here; who looks and when is the probe's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pdproxy.admission.base import Admission
from pdproxy.config import Role
from pdproxy.engines.base import Adapter, EngineClient, MalformedReply
from transfer.wire import BufferFacts

MakeAdmission = Callable[[str, int], Admission]
"""Instance name and pages of its PD buffer → what grants them."""


class Health(StrEnum):
    UNKNOWN = "unknown"
    """Has never answered."""
    ALIVE = "alive"
    """Answers, but no request has been seen to go through it."""
    READY = "ready"
    DOWN = "down"


class Instance:
    """An engine at `url`. `receiver_ports`: where the operator expects a decoder's receivers; empty: anywhere."""

    def __init__(
        self,
        name: str,
        role: Role,
        url: str,
        *,
        client: EngineClient,
        adapter: Adapter,
        make_admission: MakeAdmission,
        receiver_ports: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.role = role
        self.url = url
        self.client = client
        self.adapter = adapter
        self.suspected = asyncio.Event()
        """Somebody has reason to doubt that it is well: look at it now."""
        self._make_admission = make_admission
        self._receiver_ports = receiver_ports
        # State: health and why, and which process was proven; what it said of itself; the pages of a decoder; legs
        # under way.
        self.health = Health.UNKNOWN
        self.why = "not asked yet"
        self.facts: BufferFacts | None = None
        self.models: frozenset[str] = frozenset()
        self.num_legs = 0
        self._admission: Admission | None = None
        self._proven_epoch: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.health is Health.READY

    @property
    def epoch(self) -> str | None:
        return None if self.facts is None else self.facts.epoch

    @property
    def known_facts(self) -> BufferFacts:
        """What it said of itself; only of an instance that has ever answered."""
        if self.facts is None:
            raise RuntimeError(f"{self!r} has told nothing yet")
        return self.facts

    @property
    def admission(self) -> Admission:
        """What grants a decoder's pages; only of a decoder that has ever answered."""
        if self._admission is None:
            raise RuntimeError(f"{self!r} has no PD buffer yet")
        return self._admission

    @property
    def has_admission(self) -> bool:
        return self._admission is not None

    def serves(self, model: str | None) -> bool:
        """An instance that names no models is taken to serve any."""
        return model is None or not self.models or model in self.models

    def heard(self, facts: BufferFacts, models: frozenset[str]) -> None:
        """It answered. A new epoch is a new process: its buffer is empty, and it has to be proven anew.

        Raises `MalformedReply`, and changes nothing, where the facts do not fit the role.
        """
        self._check(facts)
        if self.role == "decode":
            self._resize(facts.num_pages)
        self.facts, self.models = facts, models
        if self._proven_epoch == facts.epoch:
            self.health, self.why = Health.READY, ""
        elif self.health is not Health.ALIVE:
            self.health, self.why = Health.ALIVE, "no canary has gone through it yet"

    def proven(self) -> None:
        """A request went through it: true as long as its process lives."""
        self.health, self.why = Health.READY, ""
        self._proven_epoch = self.epoch

    def lost(self, why: str) -> None:
        """It does not answer."""
        self.health, self.why = Health.DOWN, why

    def suspect(self, why: str, *, is_lost: bool) -> None:
        """A leg met a fault: look at once, and until then send nothing where it `is_lost`."""
        if is_lost:
            self.lost(why)
        self.suspected.set()

    def status(self) -> dict[str, Any]:
        """For the status page."""
        facts = self.facts
        told: dict[str, Any] = {
            "name": self.name,
            "role": self.role,
            "url": self.url,
            "engine": self.adapter.name,
            "state": self.health.value,
            "why": self.why,
            "epoch": self.epoch,
            "models": sorted(self.models),
            "legs": self.num_legs,
        }
        if facts is not None and self.role == "decode":
            told |= {
                "page_bytes": facts.page_bytes,
                "chunk_size": facts.chunk_size,
                "ranks": len(facts.receivers),
            }
        return told | self._pages_status()

    def _pages_status(self) -> dict[str, Any]:
        if self._admission is None or self.facts is None:
            return {}
        statistics = self._admission.statistics()
        return {
            "capacity": self.facts.num_pages,
            "held": statistics.held,
            "free": self.facts.num_pages - statistics.held,
            "queue": statistics.num_waiting,
            "queued_pages": statistics.waiting_pages,
            "granted": statistics.granted_total,
            "returned": statistics.returned_total,
        }

    def _resize(self, num_pages: int) -> None:
        if self._admission is None:
            self._admission = self._make_admission(self.name, num_pages)
        elif self.facts is None or self.facts.num_pages != num_pages:
            self._admission.resize(num_pages)

    def _check(self, facts: BufferFacts) -> None:
        if facts.role != self.role:
            raise MalformedReply(f"it is configured for {self.role} and says it is for {facts.role}")
        if self.role != "decode":
            return
        if facts.num_pages < 1 or not facts.receivers:
            raise MalformedReply(f"it has {facts.num_pages} pages and {len(facts.receivers)} receivers")
        ports = tuple(receiver.port for receiver in facts.receivers)
        if self._receiver_ports and sorted(self._receiver_ports) != sorted(ports):
            raise MalformedReply(f"its receivers listen on {ports}, and {self._receiver_ports} are configured")

    def __repr__(self) -> str:
        return f"<Instance {self.name} ({self.role}): {self.health}{', ' if self.why else ''}{self.why}>"
