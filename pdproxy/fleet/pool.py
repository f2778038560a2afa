"""Every instance there is, and who may be asked right now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pdproxy.config import Role
from pdproxy.errors import ModelNotFound, NotReady
from pdproxy.fleet.instance import Instance

ROLES: tuple[Role, ...] = ("prefill", "decode")


class Pool:
    """The instances, in the order of the configuration. Which there are does not change; their health does."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.instances: Sequence[Instance] = tuple(instances)

    def of_role(self, role: Role) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    def ready(self, role: Role, model: str | None = None) -> list[Instance]:
        """Who can take a request for `model`. Raises `ModelNotFound`, `NotReady`."""
        all_ready = [instance for instance in self.of_role(role) if instance.is_ready]
        if not all_ready:
            raise NotReady(f"no {role} instance is ready", retry_after_s=5.0)
        serving = [instance for instance in all_ready if instance.serves(model)]
        if not serving:
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        return serving

    @property
    def is_ready(self) -> bool:
        """A request would find somebody for each of its halves."""
        return all(any(instance.is_ready for instance in self.of_role(role)) for role in ROLES)

    def models(self) -> list[str]:
        """The names that both a ready prefiller and a ready decoder know, sorted."""
        names = [
            set[str]().union(*(instance.models for instance in self.of_role(role) if instance.is_ready))
            for role in ROLES
        ]
        return sorted(set.intersection(*names))

    def status(self) -> list[dict[str, Any]]:
        return [instance.status() for instance in self.instances]

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when a decoder's pages do not add up."""
        for instance in self.instances:
            if instance.has_admission:
                instance.admission.check_integrity()

    def __repr__(self) -> str:
        num_ready = sum(instance.is_ready for instance in self.instances)
        return f"<Pool {num_ready} of {len(self.instances)} ready>"
