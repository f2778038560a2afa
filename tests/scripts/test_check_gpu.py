"""`scripts/check_gpu`: its steps on the CPU, what it makes of them, and what it says where it can check nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from scripts.dev.check_gpu import command, needs, steps
from scripts.dev.check_gpu.lanes import emulated, put_lanes
from scripts.dev.check_gpu.outcome import Found, StepFailed, StepSkipped
from scripts.dev.check_gpu.steps import Machine, Step

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = Machine(torch.device("cpu"), None, seed=1)
ON_GPU = Machine(torch.device("cuda", 0), None, seed=1)
FROM_UCX = """\
[17:0]   +--------------------------+--------------------------------------------+
[17:0]   | r1 self cfg#0            | remote memory write by ucp_put* from {place} |
[17:0]   | remote memory write by ucp_put* from {place} |
[17:0]   +--------+-------------+-----------+
[17:0]   | Range  | Description | Config    |
[17:0]   | 0..4095 | short | {small} |
[17:0]   | 4096..inf | {how} | {lane} |
[17:0]   +--------+-------------+-----------+
[17:0]   | active message by ucp_am_send* from host memory |
[17:0]   | Range  | Description | Config    |
[17:0]   | 0..inf | zero-copy | tcp/lo |
"""


def from_ucx(place: str, how: str, lane: str) -> str:
    return FROM_UCX.format(place=place, how=how, lane=lane, small="tcp/lo")


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.engine
def test_the_steps_run_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those that run tests which this suite has anyway."""
    monkeypatch.chdir(tmp_path)  # children find the checkout by PYTHONPATH alone
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = [step.name for step in steps.STEPS if step.name not in ("contract", "late write", "vllm connector")]
    chosen = [word for name in names for word in ("--only", name)]
    assert command.main(["--device", "cpu", "--seed", "3", "--json", "found.json", *chosen]) == 0
    found = json.loads(Path("found.json").read_text())
    assert {step["name"]: step["status"] for step in found["steps"]} == {
        **dict.fromkeys(names, "passed"),
        "refusal": "skipped",
        "two GPUs": "skipped",
    }
    assert (found["device"], found["seed"], found["is_good"]) == ("cpu", 3, True)
    facts = {step["name"]: step["facts"] for step in found["steps"]}
    assert facts["two processes"]["lanes"] == ["host memory to host: 0..inf zero-copy cma/memory"]
    assert facts["1p1d"]["pushed_bytes"]["llama"] > 0
    assert facts["1p1d"]["lanes"] == ["host memory to host: 0..inf zero-copy cma/memory"]
    assert facts["data plane"]["lanes"] == facts["1p1d"]["lanes"]
    assert facts["data plane"]["data_plane"] == "process"
    assert facts["data plane"]["pushed_bytes"]["llama"] > 0
    assert facts["bench"]["rows"]
    assert "says nothing about a GPU" in capsys.readouterr().out


def test_the_script_itself() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "check_gpu"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--json [FILE]" in done.stdout


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "nothing was checked: the device is cuda, but torch" in capsys.readouterr().err


def test_what_is_lacking_is_named_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "TRANSFER", ("torch", "no_such_module"))
    assert command.main([]) == 2
    assert "lacks no_such_module: pip install no_such_module" in capsys.readouterr().err


def test_a_step_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--only", "lanes"]) == 2
    assert "the steps are lane, refusal, contract" in capsys.readouterr().err


def test_a_step_that_fails_is_the_exit_status_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(machine: Machine) -> Found:
        raise StepFailed("other bytes arrived")

    monkeypatch.setattr(steps, "STEPS", (Step("bad", "", bad), Step("good", "", lambda machine: Found("all well"))))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ[name])
    assert command.main(["--device", "cpu", "--json", str(tmp_path / "found.json")]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["bad", "failed"],
        ["good", "passed"],
    ]
    assert json.loads((tmp_path / "found.json").read_text())["is_good"] is False


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (StepFailed("wrong bytes"), "failed", "wrong bytes"),
        (StepSkipped("one GPU"), "skipped", "one GPU"),
        (ZeroDivisionError("whatever"), "failed", "ZeroDivisionError: whatever"),
    ],
)
def test_what_a_step_raises(error: Exception, status: str, line: str) -> None:
    def run(machine: Machine) -> Found:
        raise error

    outcome = command.attempt(Step("s", "", run), ON_CPU)
    assert (outcome.status, outcome.line) == (status, line)


def test_a_step_whose_packages_are_not_installed_is_skipped() -> None:
    outcome = command.attempt(Step("s", "", steps.lane, ("zmq", "no_such_module")), ON_CPU)
    assert (outcome.status, outcome.line) == ("skipped", "needs no_such_module: pip install no_such_module")


def test_tests_that_fail_are_a_failed_step_with_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(words: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert settings == {"PDPROXY_TEST_DEVICE": "cuda:0"}
        return subprocess.CompletedProcess(words, 1, "FAILED test_bytes\n1 failed, 26 passed in 3 s\n")

    monkeypatch.setattr(steps, "_python", failing)
    with pytest.raises(StepFailed, match=r"^1 failed, 26 passed in 3 s\nFAILED test_bytes"):
        steps.contract(ON_GPU)


def test_a_refusal_that_does_not_come_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(words: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "memory from an expandable segment was registered\n")

    monkeypatch.setattr(steps, "_python", registered)
    with pytest.raises(StepFailed, match="was registered"):
        steps.refusal(ON_GPU)


# ── lanes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_lanes_of_writes_are_named_and_each_once() -> None:
    place = "cuda/GPU0 to cuda/GPU0"
    text = from_ucx(place, "zero-copy", "cuda_ipc/cuda")
    lanes = put_lanes(text + text)
    assert lanes == [f"{place}: 0..4095 short tcp/lo", f"{place}: 4096..inf zero-copy cuda_ipc/cuda"]
    assert not emulated(lanes)
    assert put_lanes("nothing of UCX") == []


def test_a_lane_in_software_is_seen() -> None:
    lanes = put_lanes(from_ucx("cuda/GPU0 to cuda/GPU1", "software emulation", "tcp/lo"))
    assert emulated(lanes) == ["cuda/GPU0 to cuda/GPU1: 4096..inf software emulation tcp/lo"]


def test_a_lane_from_host_memory_to_a_gpu_is_nobodys() -> None:
    """As an H100 shows it: UCX copies there in software, and takes cuda_ipc from GPU memory."""
    lanes = put_lanes(
        from_ucx("host memory to cuda/dev[1]", "software emulation", "tcp/lo")
        + from_ucx("cuda/GPU0 to cuda/dev[1]", "zero-copy", "cuda_ipc/cuda")
    )
    assert len(lanes) == 4
    assert not emulated(lanes)


def test_the_lanes_of_one_process_can_be_left_out() -> None:
    """A process of its own pushes, and its engine has written too, when it checked its lane."""
    text = from_ucx("host memory to host", "zero-copy", "cma/memory").replace("[17:0]", "[1.5] [vm2:2017:0]")
    text += from_ucx("cuda/GPU0 to cuda/GPU0", "zero-copy", "cuda_ipc/cuda")
    assert [lane.partition(":")[0] for lane in put_lanes(text, but_of=2017)] == ["cuda/GPU0 to cuda/GPU0"] * 2
    assert [lane.partition(":")[0] for lane in put_lanes(text, but_of=17)] == ["host memory to host"] * 2


def test_engines_that_push_in_software_are_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_software(*arguments: object, data_plane: str) -> Found:
        return Found("the same tokens", {"lanes": ["cuda/GPU0 to cuda/GPU0: 0..inf software emulation tcp/lo"]})

    monkeypatch.setattr(steps, "one_and_one", in_software)
    with pytest.raises(StepFailed, match=r"the same tokens, over cuda/GPU0 .*: UCX has no lane for this memory"):
        steps.data_plane(ON_GPU)
