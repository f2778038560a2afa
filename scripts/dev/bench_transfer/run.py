"""One run from beginning to end. It has processes per kind of memory, and one measurement after the other, within one
deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from scripts.dev.bench_transfer.machine import busy_seconds, copy_rate
from scripts.dev.bench_transfer.measures import Tell, idle_and_latency, layerwise, throughput
from scripts.dev.bench_transfer.processes import Children, children
from scripts.dev.bench_transfer.report import Findings, OnMemory
from scripts.dev.bench_transfer.stage import Stage

LIFETIME_MARGIN_S = 30.0


def devices() -> list[tuple[str, str]]:
    """Returns (torch's name, NIXL's name) of every kind of memory that this machine has."""
    return [("cpu", "DRAM"), *([("cuda", "VRAM")] if torch.cuda.is_available() else [])]


async def measure(findings: Findings, deadline_s: float, tell: Tell, on: Sequence[tuple[str, str]] = ()) -> None:
    """Fills in `findings`, for the memory named in `on` as in `devices`, by default all there is.

    `deadline_s` is the caller's. No process outlives it by much, whatever becomes of us.
    """
    torch.set_num_threads(1)
    findings.machine["copy_gb_s"] = copy_rate()
    findings.machine["busy_elsewhere_cores"] = 0.0
    for device, memory in on or devices():
        found = OnMemory(memory)
        findings.devices.append(found)
        tell(f"starting processes for {memory}")
        async with children(max(findings.plan.senders), device, deadline_s + LIFETIME_MARGIN_S) as kids:
            await _measure(found, findings, kids, tell)


async def _measure(found: OnMemory, findings: Findings, kids: Children, tell: Tell) -> None:
    plan, stage = findings.plan, Stage(kids, findings.seed)
    started, busy = time.monotonic(), busy_seconds() - await _own_cpu(kids)
    found.idle, found.latency = await idle_and_latency(stage, plan, tell)
    found.layerwise = await layerwise(stage, plan, tell)
    await throughput(stage, plan, found.cases, tell)
    busy = busy_seconds() - await _own_cpu(kids) - busy
    elsewhere = max(0.0, busy / (time.monotonic() - started))
    findings.machine["busy_elsewhere_cores"] = max(findings.machine["busy_elsewhere_cores"], elsewhere)


async def _own_cpu(kids: Children) -> float:
    return time.process_time() + sum([float(await child.ask("cpu")) for child in kids.all])
