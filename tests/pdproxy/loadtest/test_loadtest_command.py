"""The command line: what is asked becomes a run, everything is written, Ctrl-C loses nothing, exit statuses tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pdproxy.loadtest.command import DISTRUSTED, UNANSWERED, UNMET, app
from pdproxy.loadtest.record import read_run, write_run
from tests.fakes.measured_runs import health, lively_run, record, run_of
from tests.fakes.stub_openai import StubOpenAI, Visit, stub_openai

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 30.0
MODELS = {"v1/models": {"data": [{"id": "stub"}]}}
LENIENT = ("--late-limit", "10")
"""These tests are not about the generator's speed."""


@contextmanager
def address(script: Callable[[Visit], Awaitable[None]] = Visit.answer) -> Iterator[StubOpenAI]:
    """A server in a thread of its own."""
    found: list[StubOpenAI] = []
    is_up = threading.Event()

    async def serve() -> None:
        async with stub_openai(script, **MODELS) as stub:
            found.append(stub)
            loops.append(asyncio.get_running_loop())
            ends.append(asyncio.Event())
            is_up.set()
            await ends[0].wait()

    loops: list[asyncio.AbstractEventLoop] = []
    ends: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(PATIENCE_S)
    try:
        yield found[0]
    finally:
        loops[0].call_soon_threadsafe(ends[0].set)
        thread.join(PATIENCE_S)


def loadtest(*words: str, folder: Path) -> Result:
    return CliRunner().invoke(app, [*words, *(("--out", str(folder)) if words[0] == "run" else ())])


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    with address() as stub:
        words = ["--rate", "60", "--requests", "12", "--prompt", "20", "--answer", "3", "--seed", "5"]
        result = loadtest("run", stub.url, *words, "--slo", "ttft:p99<30", *LENIENT, "--json", folder=tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "seed 5" in result.output
    assert "met TTFT p99 < 30 s" in result.output
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["report.html", "run.jsonl", "summary.json"]
    run = read_run(tmp_path / "out" / "run.jsonl")
    assert (len(run.records), run.head.model, run.head.seed) == (12, "stub", 5)
    assert all(one.is_ok and one.answer_tokens == 3 for one in run.records)
    figures = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert figures["runs"][0]["figures"]["num_ok"] == 12
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_everything_that_can_be_asked_for_reaches_the_address(tmp_path: Path) -> None:
    with address() as stub:
        words = ["--clients", "2", "--requests", "6", "--endpoint", "chat", "--model", "mine", "--stream-share", "0"]
        words += ["--extra", '{"temperature": null, "top_p": 0.5}', "--turns", "3", "--turn-think", "0"]
        result = loadtest("run", stub.url, *words, *LENIENT, folder=tmp_path)
    assert result.exit_code == 0, result.output
    asked = [visit for visit in stub.visits if len(visit.body["messages"]) > 1]
    assert asked
    assert {visit.path for visit in stub.visits} == {"/v1/chat/completions"}
    assert all("temperature" not in visit.body and visit.body["top_p"] == 0.5 for visit in stub.visits)
    assert all(visit.body["model"] == "mine" and not visit.body["stream"] for visit in stub.visits)


def test_a_sweep_looks_at_one_rate_after_the_other(tmp_path: Path) -> None:
    with address() as stub:
        words = ["--sweep", "--rate", "30", "--max-rate", "60", "--duration", "0.5", "--warmup", "0.1"]
        words += ["--prompt", "20", "--answer", "2", "--slo", "e2e:p50<20"]
        result = loadtest("run", stub.url, *words, *LENIENT, folder=tmp_path)
    assert result.exit_code == 0, result.output
    assert "30.0 requests/s: E2E p50 < 20 s: met with" in result.output
    assert "the target was met at every rate up to 60.0" in result.output
    assert "up to 60.0 requests/s met E2E p50 < 20 s" in result.output
    assert [one.name for one in sorted(tmp_path.glob("*.jsonl"))] == ["rate-00030.000.jsonl", "rate-00060.000.jsonl"]
    assert "Goodput against rate" in (tmp_path / "report.html").read_text()


def test_a_sweep_in_which_no_rate_met_the_target_fails_and_says_so(tmp_path: Path) -> None:
    words = ["--sweep", "--rate", "30", "--max-runs", "2", "--duration", "0.5", "--warmup", "0.1"]
    words += ["--prompt", "20", "--answer", "2", "--slo", "e2e:p50<0.000001"]
    with address() as stub:
        result = loadtest("run", stub.url, *words, *LENIENT, folder=tmp_path)
    assert result.exit_code == UNMET, result.output
    assert "no rate met the target, down to 15.0 requests/s" in result.output
    assert (tmp_path / "report.html").exists()


def test_a_generator_that_was_late_does_not_vouch_for_its_figures(tmp_path: Path) -> None:
    with address() as stub:
        result = loadtest("run", stub.url, "--rate", "50", "--requests", "5", "--late-limit", "1e-9", folder=tmp_path)
    assert result.exit_code == DISTRUSTED
    assert "not to be quoted" in result.output
    assert (tmp_path / "run.jsonl").exists()


async def refuse(visit: Visit) -> None:
    await visit.json({"error": {"message": "no room", "code": "full"}}, status=503)


def test_a_test_without_one_answer_fails(tmp_path: Path) -> None:
    words = ["--rate", "60", "--requests", "3", "--token-ids", "1:50", "--seed", "5"]
    with address(refuse) as stub:
        result = loadtest("run", stub.url, *words, *LENIENT, folder=tmp_path / "refused")
    assert result.exit_code == UNANSWERED, result.output
    assert "none of the 3 requests was answered, so that nothing was measured" in result.output
    assert (tmp_path / "refused" / "report.html").exists(), "what was seen is written all the same"
    with address() as stub:
        result = loadtest("run", stub.url, *words, "--warmup", "20", *LENIENT, folder=tmp_path / "early")
    assert result.exit_code == UNANSWERED, result.output
    assert "no request came after the warm-up" in result.output


def test_a_folder_has_one_test_in_it(tmp_path: Path) -> None:
    """Of a sweep, the other's rates would be taken for its own."""
    (tmp_path / "rate-00002.000.jsonl").touch()
    result = loadtest("run", "http://127.0.0.1:9", "--rate", "2", folder=tmp_path)
    assert result.exit_code == 2
    assert "has runs in it already" in result.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run"], "give an address, or --cluster"),
        (["run", "http://x", "--cluster", "1:1"], "give an address, or --cluster"),
        (["run", "http://x"], "give one of --rate, --clients and --trace"),
        (["run", "http://x", "--rate", "2", "--clients", "3"], "not --rate and --clients"),
        (["run", "http://x", "--rate", "2", "--slo", "fast"], "'fast' is no objective"),
        (["run", "http://x", "--rate", "2", "--prompt", "few"], "--prompt: 'few' is no distribution of lengths"),
        (["run", "http://x", "--rate", "2", "--turns", "2", "--message", "0"], "--message: "),
        (["run", "http://x", "--rate", "2", "--questions", "0"], "the number of questions: 0"),
        (["run", "--cluster", "1:1", "--rate", "2", "--sweep"], "a sweep needs a target"),
        (["run", "http://x", "--rate", "2", "--faults", "9 kill x"], "faults can only be done to a cluster"),
        (["run", "--cluster", "1:1", "--rate", "2", "--duration", "5", "--faults", "9 kill x"], "it is over by then"),
        (["run", "http://x", "--clients", "2", "--sweep"], "--sweep begins at --rate"),
        (["run", "http://x", "--rate", "2", "--sweep"], "a sweep needs a target"),
        (["run", "http://x", "--rate", "2", "--sweep", "--faults", "9 kill x"], "--faults are for one run"),
        (["run", "http://x", "--rate", "2", "--abort-phases", "lunch"], "there is no 'lunch'"),
        (["run", "http://x", "--rate", "2", "--token-ids", "9"], "give FIRST:LAST"),
        (["run", "http://x", "--rate", "2", "--extra", "[]"], "--extra is not a JSON object"),
        (["run", "http://x", "--rate", "2", "--header", "x"], "give NAME:VALUE"),
        (["run", "http://x", "--trace", "/nowhere"], "No such file"),
        (["run", "--cluster", "1:x", "--rate", "2"], "give PREFILLERS:DECODERS"),
        (["run", "--house", "1:x", "--rate", "2"], "give PREFILLERS:DECODERS"),
        (["run", "http://127.0.0.1:9", "--rate", "2"], "http://127.0.0.1:9 cannot be reached: "),
        (["compare", "/nowhere"], "No such file"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(words: list[str], why: str, tmp_path: Path) -> None:
    result = loadtest(*words, *(["--model", "m"] if "--sweep" in words else []), folder=tmp_path)
    assert result.exit_code == 2, result.output
    (said,) = [line for line in result.output.splitlines() if line.startswith("loadtest: ")]
    assert why in said


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with address() as stub:
        result = loadtest("run", stub.url, "--rate", "50", "--requests", "5", folder=tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "nothing can be written into" in result.output
    assert not stub.visits


def test_runs_are_compared(tmp_path: Path) -> None:
    write_run(lively_run(seconds=6), tmp_path / "a.jsonl")
    write_run(lively_run(seconds=6, seed=2, slowness=2.0), tmp_path / "b.jsonl")
    words = ["compare", f"{tmp_path}/a.jsonl", f"slow={tmp_path}/b.jsonl", "--html", f"{tmp_path}/x.html"]
    result = loadtest(*words, "--json", f"{tmp_path}/x.json", "--slo", "e2e:p99<60", folder=tmp_path)
    assert result.exit_code == 0, result.output
    assert "slow: met E2E p99 < 60 s" in result.output or "slow: missed" in result.output
    assert "<h1>Load tests compared: a and slow</h1>" in (tmp_path / "x.html").read_text()
    assert [one["label"] for one in json.loads((tmp_path / "x.json").read_text())["runs"]] == ["a", "slow"]


def test_a_comparison_with_a_late_run_is_not_to_be_quoted_either(tmp_path: Path) -> None:
    write_run(run_of([record(0)], health=health(late_p99_s=1.0)), tmp_path / "a.jsonl")
    assert loadtest("compare", f"{tmp_path}/a.jsonl", "--html", f"{tmp_path}/x.html", folder=tmp_path).exit_code == (
        DISTRUSTED
    )


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    async def half_of_them(visit: Visit) -> None:
        if not visit.body["stream"] or len(stub.visits) % 2:
            await visit.answer()
        else:
            await visit.gone()

    with address(half_of_them) as stub:
        words = ["run", stub.url, "--rate", "50", "--duration", "600", "--out", str(tmp_path / "out"), *LENIENT]
        command = [sys.executable, "-m", "pdproxy", "loadtest", *words]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(stub.visits) < 30 and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130, said.decode()
    run = read_run(tmp_path / "out" / "run.jsonl")
    assert run.head.is_interrupted
    ends = [one.error for one in run.records]
    assert ends.count("") >= 8
    assert ends.count("interrupted") >= 8
    assert "stopped before its end" in (tmp_path / "out" / "report.html").read_text()


def test_the_script_is_the_command() -> None:
    """Its help, as that of `pdproxy loadtest`."""
    command = [sys.executable, "scripts/loadtest.py", "run", "--help"]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    assert "--slo" in script.stdout
    assert "--faults" in script.stdout
