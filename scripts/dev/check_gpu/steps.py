"""The steps, in the order in which they are run. Each returns what it found, or raises an error that says why it failed
or was skipped."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from scripts.dev.bench_transfer.machine import describe
from scripts.dev.bench_transfer.plan import CONTIGUOUS, MIB, NUM_LAYERS, QUICK, SERIAL, Case, Plan
from scripts.dev.bench_transfer.processes import children
from scripts.dev.bench_transfer.report import Findings, make_report, shortfalls
from scripts.dev.bench_transfer.run import measure
from scripts.dev.bench_transfer.stage import Stage
from scripts.dev.check_gpu import needs
from scripts.dev.check_gpu.engines import one_and_one
from scripts.dev.check_gpu.lanes import emulated, put_lanes
from scripts.dev.check_gpu.outcome import Found, StepFailed, StepSkipped
from transfer.agents.lane import check_lane, measure_lane
from transfer.agents.nixl import NixlAgent

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
TESTS_LIMIT_S = 240.0
"""The most seconds that another Python, with tests for example, may take."""
STEP_LIMIT_S = 240.0
"""The most seconds that a step may take in this process."""
SAMPLES = 3
BRIEF = Plan(
    page_sizes=(MIB,),
    senders=(1,),
    total_bytes=16 * MIB,
    rounds=1,
    pushes=10,
    layered_bytes=8 * MIB,
    idle_s=0.2,
)
"""A plan that is enough to see that the benchmark runs; its figures say nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A `Machine` names the devices to check. `second` is another GPU where there is one; on the CPU every step is as
    short as can be."""

    device: torch.device
    second: torch.device | None
    seed: int

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Step:
    """A `Step` is one check. `about` says in a few words what is checked."""

    name: str
    about: str
    run: Callable[[Machine], Found]
    modules: tuple[str, ...] = ()
    """The modules that the step needs besides `needs.TRANSFER`."""


def lane(machine: Machine) -> Found:
    def new_agent(epoch: str, receives: bool) -> NixlAgent:
        return NixlAgent(epoch, receives=receives, device=machine.device)

    found = measure_lane(new_agent, machine.device)
    check_lane(found)
    return Found(f"{found.gb_s:.1f} GB/s, a plain copy {found.copy_gb_s:.1f}", asdict(found))


def refusal(machine: Machine) -> Found:
    if not machine.is_gpu:
        raise StepSkipped("there are no expandable segments on the CPU")
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = _python(["-m", "scripts.dev.check_gpu.refusal", str(machine.device)], settings)
    if done.returncode:
        raise StepFailed(_last_line(done))
    return Found("refused", {"error": _last_line(done)})


def contract(machine: Machine) -> Found:
    return _tests(machine, "tests/transfer/test_agent_contract.py", "nixl" if machine.is_gpu else "nixl and under_way")


def late_write(machine: Machine) -> Found:
    return _tests(machine, "tests/transfer/test_nixl_processes.py", "late or frozen_in" if machine.is_gpu else "late")


def connector(machine: Machine) -> Found:
    return _tests(machine, "tests/transfer/connectors/test_vllm_on_device.py", "test")


def two_processes(machine: Machine) -> Found:
    return _timed(_two_processes(machine, machine.device))


def two_gpus(machine: Machine) -> Found:
    if machine.second is None:
        raise StepSkipped(f"torch sees {torch.cuda.device_count()} GPUs; this needs two")
    return _timed(_two_processes(machine, machine.second))


def engines(machine: Machine) -> Found:
    families = ("llama", "gemma3", "deepseek") if machine.is_gpu else ("llama",)
    return _one_and_one(machine, families, "thread")


def data_plane(machine: Machine) -> Found:
    return _one_and_one(machine, ("llama",), "process")


def bench(machine: Machine) -> Found:
    """Measures ours beside bare NIXL. What falls short of the documented figures is told, and is no failure of this
    step."""
    findings = Findings(
        plan=QUICK if machine.is_gpu else BRIEF,
        seed=machine.seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(),
        ucx={name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
    )
    memory = "VRAM" if machine.is_gpu else "DRAM"
    _timed(measure(findings, STEP_LIMIT_S, lambda _: None, [(str(machine.device), memory)]))
    report = make_report(findings, is_complete=True)
    rows = report["rows"]
    fastest = max(rows, key=lambda row: float(row["gb_s"]))
    ratio = statistics.median(row["ratio_to_nixl"] for row in rows)
    short = "".join(f"; short: {text}" for text in shortfalls(report))
    line = f"{len(rows)} cases, {ratio:.2f} of bare NIXL's GB/s (median), at most {fastest['gb_s']:.1f} GB/s"
    return Found(line + (short if machine.is_gpu else ""), report)


STEPS = (
    Step("lane", "the write that an engine does at its start", lane),
    Step("refusal", "memory that no other process can map is refused", refusal),
    Step("contract", "the agents' contract tests", contract, needs.TESTS),
    Step("two processes", "bytes and lanes between two processes on one device", two_processes),
    Step("two GPUs", "the same from the second GPU to the first", two_gpus),
    Step("late write", "a write that lands late is seen, and harms nobody", late_write, needs.PROCESS_TESTS),
    Step("1p1d", "a prefiller and a decoder answer as one engine", engines, needs.ENGINE),
    Step(
        "data plane",
        "the same, pushed by a process of its own that maps the prefiller's pages",
        data_plane,
        needs.ENGINE,
    ),
    Step("vllm connector", "both halves of the connector for vLLM, around a stand-in", connector, needs.CONNECTOR),
    Step("bench", "beside bare NIXL and a plain copy", bench),
)


async def _two_processes(machine: Machine, sender_on: torch.device) -> Found:
    """Checks that pages arrive as they were sent, through ours and through bare NIXL, and finds the lane that UCX
    took."""
    pages = 256 if machine.is_gpu else 16
    case = Case(MIB, CONTIGUOUS, SERIAL, 1, pages * MIB)
    with _environment({"UCX_PROTO_INFO": "y"}):
        async with children(1, str(machine.device), STEP_LIMIT_S, senders_on=str(sender_on)) as kids:
            stage = Stage(kids, machine.seed)
            await stage.lay_out(case.page_bytes, pages, NUM_LAYERS)
            await stage.add_bare()
            await stage.prepare(case)
            await stage.check()
            samples = [(await stage.ours())[0] for _ in range(SAMPLES)]
            lanes = put_lanes(kids.senders[0].said())
    gb_s = case.total_bytes / 1e9 / min(sample.seconds for sample in samples)
    facts = {"gb_s": gb_s, "bytes": case.total_bytes, "from": str(sender_on), "to": str(machine.device), "lanes": lanes}
    line = f"{sender_on} → {machine.device}: {gb_s:.1f} GB/s over {', '.join(lanes) or 'a lane that UCX did not name'}"
    return _over_lanes(machine, Found(line, facts))


def _one_and_one(machine: Machine, families: tuple[str, ...], data_plane: str) -> Found:
    device, prefiller_on = str(machine.device), str(machine.second or machine.device)
    with _environment({"UCX_PROTO_INFO": "y"}):
        found = _timed(one_and_one(device, prefiller_on, families, machine.seed, data_plane=data_plane))
    lanes = ", ".join(found.facts["lanes"]) or "a lane that UCX did not name"
    return _over_lanes(machine, Found(f"{found.line}, over {lanes}", found.facts))


def _over_lanes(machine: Machine, found: Found) -> Found:
    """Returns what was found. Raises `StepFailed` where UCX copied from GPU memory in software."""
    if machine.is_gpu and emulated(found.facts["lanes"]):
        raise StepFailed(f"{found.line}: UCX has no lane for this memory (UCX_TLS must allow cuda_copy and cuda_ipc)")
    return found


def _timed(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result. Raises `StepFailed` after `STEP_LIMIT_S`."""

    async def within() -> T:
        async with asyncio.timeout(STEP_LIMIT_S):
            return await work

    try:
        return asyncio.run(within())
    except TimeoutError:
        raise StepFailed(f"not done within {STEP_LIMIT_S:g} s") from None


def _tests(machine: Machine, file: str, chosen: str) -> Found:
    """Runs those tests of `file` whose names match `chosen`, with their memory on the device."""
    if not (ROOT / file).is_file():
        raise StepSkipped(f"{file} is not here")
    options = ["-c", "scripts/dev/check_gpu/pytest.ini", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q"]
    settings = {"PDPROXY_TEST_DEVICE": str(machine.device)}
    done = _python(["-m", "pytest", *options, file, "-k", chosen], settings)
    if done.returncode:
        raise StepFailed(f"{_last_line(done)}\n{done.stdout.strip()}")
    return Found(_last_line(done), {"tests": file, "chosen": chosen})


def _python(words: list[str], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TESTS_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepFailed(f"not done within {TESTS_LIMIT_S:g} s") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"ended with {done.returncode} and without a word"


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for child processes while the block lasts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
