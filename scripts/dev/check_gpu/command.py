"""Checks whether the KV transfer keeps its promises on this machine's GPU. Each step passes, fails or is skipped."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.dev.check_gpu import needs
from scripts.dev.check_gpu.outcome import Outcome, StepFailed, StepSkipped

if TYPE_CHECKING:
    from scripts.dev.check_gpu.steps import Machine, Step

NOTHING_CHECKED = 2


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where no step failed, 1 where one did, 2 where nothing could be checked."""
    lacking = needs.missing(needs.COMMAND_LINE)
    if lacking:
        return _refuse(f"{sys.executable} lacks {', '.join(lacking)}: pip install {' '.join(lacking)}")
    from scripts.dev.check_gpu.options import app
    from transfer.command_line.commands import exit_status

    return exit_status(app, "scripts/check_gpu", words)


def check(device_name: str, only: Sequence[str], seed: int | None, json_file: Path | None) -> int:
    """Checks this machine, and returns the exit status as `main` does."""
    lacking = needs.missing(needs.TRANSFER)
    if lacking:
        return _refuse(f"{sys.executable} lacks {', '.join(lacking)}: pip install {' '.join(lacking)}")
    from scripts.dev.bench_transfer.machine import set_ucx
    from scripts.dev.check_gpu.steps import STEPS
    from transfer.agents.device import resolve
    from transfer.command_line.json_file import STDOUT, write_json
    from transfer.errors import TransferError

    steps = [step for step in STEPS if not only or step.name in only]
    if len(steps) < len(only):
        return _refuse(f"--only: the steps are {', '.join(step.name for step in STEPS)}")
    try:
        device = resolve(device_name)
    except TransferError as error:
        return _refuse(f"{error}. With --device cpu the steps run without a GPU, which only checks this command itself")
    ucx = set_ucx(os.environ, has_gpu=device.type == "cuda")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    machine = _machine(device, random.SystemRandom().randrange(1_000_000) if seed is None else seed)
    out = sys.stderr if json_file == STDOUT else sys.stdout
    print(f"{_title(machine)}, seed {machine.seed}", file=out, flush=True)
    outcomes = []
    for step in steps:
        outcomes.append(attempt(step, machine))
        print(outcomes[-1], file=out, flush=True)
    if json_file is not None:
        write_json(json_file, _report(machine, ucx, outcomes))
    return int(any(outcome.status == "failed" for outcome in outcomes))


def attempt(step: Step, machine: Machine) -> Outcome:
    """Runs one step. Whatever it raises is this step's failure, and the next ones are run all the same."""
    started = time.monotonic()

    def ended(status: Any, line: str, facts: dict[str, Any] | None = None) -> Outcome:
        return Outcome(step.name, status, time.monotonic() - started, line, facts or {})

    lacking = needs.missing(step.modules)
    if lacking:
        return ended("skipped", f"needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    try:
        found = step.run(machine)
    except StepSkipped as reason:
        return ended("skipped", str(reason))
    except StepFailed as reason:
        return ended("failed", str(reason))
    except Exception as error:  # border: a step may meet anything on a machine that nobody has seen
        return ended("failed", f"{type(error).__name__}: {error}")
    return ended("passed", found.line, found.facts)


def _refuse(reason: str) -> int:
    print(f"nothing was checked: {reason}", file=sys.stderr)
    return NOTHING_CHECKED


def _machine(device: Any, seed: int) -> Machine:
    import torch

    from scripts.dev.check_gpu.steps import Machine

    count = torch.cuda.device_count() if device.type == "cuda" else 0
    others = [index for index in range(count) if index != device.index]
    return Machine(device, torch.device("cuda", others[0]) if others else None, seed)


def _title(machine: Machine) -> str:
    import torch

    if not machine.is_gpu:
        return f"the CPU, with torch {torch.__version__}: this says nothing about a GPU"
    name = torch.cuda.get_device_name(machine.device)
    return f"{machine.device}, {name}, with torch {torch.__version__} and CUDA {torch.version.cuda}"


def _report(machine: Machine, ucx: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    from dataclasses import asdict

    from scripts.dev.bench_transfer.machine import describe

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(machine.device),
        "seed": machine.seed,
        "machine": describe(),
        "ucx": ucx,
        "is_good": all(outcome.status != "failed" for outcome in outcomes),
        "steps": [asdict(outcome) for outcome in outcomes],
    }
