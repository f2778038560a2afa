"""The soak itself has five steps: warm up, look, storm, let it settle, look again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.dev.common.child import Child, ChildGroup, child_group
from scripts.dev.soak_transfer.plan import CONFIG, STALL_LIMIT_S, SoakOptions
from transfer.agents.nixl import EXIT_OVERSLEPT

PACKAGE = "scripts.dev.soak_transfer"
WARM_UP_SHARE, MAX_WARM_UP_S = 0.2, 20.0
SAMPLE_S = 0.5
KILL_PAUSE_S = (3.0, 15.0)
FREEZE_SHARE = 0.5
FREEZE_S = (0.5, CONFIG.writer_timeout_s + 1.5)
"""The least and the most seconds of a freeze: from a hiccup to longer than the decoder waits for a word."""
UNHURRIED_S = 60.0
"""The seconds of a soak without haste. A shorter soak kills in shorter intervals."""
LIFE_BEYOND_S = 300.0


@dataclass(slots=True)
class Findings:
    """`Findings` hold what is known so far. Mutable state: all of it; empty or None for what has not been looked at."""

    options: SoakOptions
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Holds the looks at the decoder during the storm."""
    last: dict[str, Any] = field(default_factory=dict)
    """Holds the look at the decoder when everything was over."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts what came of the wishes of those prefillers that were not killed since."""
    num_kills: int = 0
    num_freezes: int = 0
    num_overslept: int = 0
    """Counts the processes that were stopped in the middle of a write, and ended themselves when they went on."""
    is_settled: bool | None = None
    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Holds the vitals of the decoder and of those prefillers that are never killed."""


async def soak(findings: Findings, tell: Callable[[str], object]) -> None:
    """Runs the soak. `findings` are filled in as they come. Raises `BenchError` when a process fails."""
    options = findings.options
    async with child_group() as children:
        tell("starting")
        cluster = TransferCluster(children, options)
        await cluster.start()
        warm_up_s = min(options.duration_s * WARM_UP_SHARE, MAX_WARM_UP_S)
        tell(f"warming up for {warm_up_s:.0f} s")
        await cluster.admit()
        await asyncio.sleep(warm_up_s)
        await cluster.calm()
        findings.before = await cluster.vitals()
        tell(f"storming for {options.duration_s - warm_up_s:.0f} s")
        await cluster.admit()
        await _storm(findings, cluster, options.duration_s - warm_up_s)
        tell("settling")
        findings.is_settled = await cluster.calm()
        findings.last = await cluster.decoder.ask("look")
        findings.counts = await cluster.counts()
        findings.after = await cluster.vitals()


class TransferCluster:
    """A `TransferCluster` is the decoder and the prefillers' processes.

    Mutable state: `prefillers`, the living ones, by place.
    """

    def __init__(self, children: ChildGroup, options: SoakOptions) -> None:
        self._children = children
        self._options = options
        self._num_started = 0
        self._lifetime_s = options.duration_s + LIFE_BEYOND_S
        self.prefillers: list[Child] = []

    async def start(self) -> None:
        options = self._options
        self.decoder = await self._children.start(
            "decoder", f"{PACKAGE}.decoder", options.num_pages, options.seed, self._lifetime_s
        )
        self.prefillers = [await self._start(place) for place in range(options.num_processes)]
        self._port = await self.decoder.ask("start")
        await asyncio.gather(*(child.ask("start", self._port) for child in self.prefillers))

    async def admit(self) -> None:
        for child in self.prefillers:
            await child.ask("admit")

    async def calm(self) -> bool:
        """Lets everything end. Returns True when every page is free, in time."""
        await asyncio.gather(*(child.ask("calm") for child in self.prefillers))
        is_settled: bool = await self.decoder.ask("settle", 2 * STALL_LIMIT_S)
        return is_settled

    async def replace(self, place: int) -> None:
        """Kills one process in whatever it does, and starts another in its place."""
        await self._children.kill(self.prefillers[place])
        self.prefillers[place] = await self._start(place)
        await self.prefillers[place].ask("start", self._port)
        await self.prefillers[place].ask("admit")

    async def freeze(self, place: int, seconds: float) -> bool:
        """Stops one process in whatever it does. Returns whether it goes on; else another one takes its place."""
        goes_on = await self.prefillers[place].stand_still(seconds, may_end_with=EXIT_OVERSLEPT)
        if not goes_on:
            await self.replace(place)
        return goes_on

    async def counts(self) -> Counter[str]:
        return sum([Counter(await child.ask("counts")) for child in self.prefillers], Counter())

    async def vitals(self) -> dict[str, dict[str, Any]]:
        return {"decoder": await self.decoder.ask("vitals"), "prefillers": await self.prefillers[0].ask("vitals")}

    async def _start(self, place: int) -> Child:
        options = self._options
        share = len(range(place, options.num_prefillers, options.num_processes))
        self._num_started += 1
        seed = f"{options.seed}/{self._num_started}"
        words = share, options.num_pages, options.num_at_once, seed, self._lifetime_s
        return await self._children.start("prefillers", f"{PACKAGE}.prefillers", *words)


async def _storm(findings: Findings, cluster: TransferCluster, seconds: float) -> None:
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_sample(findings, cluster, until))
        tasks.create_task(_torment(findings, cluster, until))


async def _sample(findings: Findings, cluster: TransferCluster, until: float) -> None:
    while time.monotonic() + SAMPLE_S < until:
        await asyncio.sleep(SAMPLE_S)
        findings.samples.append(await cluster.decoder.ask("look"))


async def _torment(findings: Findings, cluster: TransferCluster, until: float) -> None:
    """Kills and replaces process after process, or stops one for a while. The first is spared, so that its growth can
    be seen."""
    dice = random.Random(f"{findings.options.seed} kills")
    haste = min(1.0, findings.options.duration_s / UNHURRIED_S)
    while len(cluster.prefillers) > 1:
        pause_s = dice.uniform(*KILL_PAUSE_S) * haste
        if time.monotonic() + pause_s > until:
            return
        await asyncio.sleep(pause_s)
        place = dice.randrange(1, len(cluster.prefillers))
        if dice.random() < FREEZE_SHARE:
            findings.num_freezes += 1
            findings.num_overslept += not await cluster.freeze(place, dice.uniform(*FREEZE_S) * haste)
        else:
            await cluster.replace(place)
            findings.num_kills += 1
