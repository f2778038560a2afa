"""The benchmark's command line: it starts vLLM with one connector after the other, and compares what was measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pdproxy.config.options import Json, Seed, option
from scripts.dev.common.outcome import seed_of
from scripts.dev.start import ROOT
from transfer.command_line.commands import Command
from transfer.command_line.json_file import console_beside, write_json
from transfer.command_line.tables import Table

OURS, PEER = "vllm_transfer", "vllm_nixl"
BETTER_HIGH = frozenset({"answers_per_s"})
"""The figures of which more is better; of all others less is."""
WHAT = {
    "after_prefill_ms": "end of prefill → first token, ms",
    "first_token_ms": "first token, ms",
    "answers_per_s": "answers/s, 8 at once",
    "answer_ms": "one of them, ms",
    "turn_1_kib": "KiB sent, turn 1",
    "turn_2_kib": "KiB sent, turn 2",
    "turn_3_kib": "KiB sent, turn 3",
}
ENGINE_ARGS = "--enforce-eager --max-num-seqs 16 --num-gpu-blocks-override 1200 --max-model-len 2048"
START_TIMEOUT_S = 900

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=Command)
def main(
    rounds: Annotated[int, option("N", "Rounds; each starts either fleet once", min=1, group="What is measured")] = 3,
    seed: Seed = None,
    python: Annotated[Path | None, option("PATH", "Python of vLLM's environment [default: it is installed]")] = None,
    json_file: Json = None,
) -> None:
    """Measure vLLM with pdproxy's own connector beside vLLM with its NixlConnector.

    Either fleet is one prefiller and one decoder of vLLM on this machine's processor, with a tiny random model, behind
    the proxy. They are started in turns. Prompts have 1,500 tokens; a conversation has three turns.
    """
    console, the_seed = console_beside(json_file), seed_of(seed)
    console.print(f"seed {the_seed}, {rounds} rounds", highlight=False)
    engine_python = python or _installed()
    found: dict[str, list[dict[str, Any]]] = {OURS: [], PEER: []}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        model = _make_model(Path(folder) / "model")
        for number in range(rounds):
            for kind in (OURS, PEER) if number % 2 == 0 else (PEER, OURS):
                console.print(f"round {number + 1}: {kind}", highlight=False)
                found[kind].append(_run(kind, model, engine_python, Path(folder), the_seed + number))
    rows = {name: _row(name, found) for name in WHAT}
    table = Table("what", "ours", "NixlConnector", "ratio", "worst round", title="medians of all rounds")
    for name, row in rows.items():
        cells = (f"{row['ours']:.1f}", f"{row['peer']:.1f}", f"{row['ratio']:.2f}", f"{row['worst']:.2f}")
        table.add_row(WHAT[name], *cells)
    table.print_to(console)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(json_file, {"date": date, "seed": the_seed, "rounds": rounds, "rows": rows, "measured": found})


def _row(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Returns the medians of a figure, their ratio, and the ratio of the round that is worst for us."""
    ours, peer = ([one[name] for one in found[kind]] for kind in (OURS, PEER))
    ratios = [a / b if b else float(a > 0) for a, b in zip(ours, peer, strict=True)]
    return {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": statistics.median(ratios),
        "worst": min(ratios) if name in BETTER_HIGH else max(ratios),
    }


def _run(kind: str, model: Path, python: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Starts a fleet, measures it and ends it. Returns what was measured."""
    file = folder / "measured.json"
    file.unlink(missing_ok=True)
    log = folder / "fleet.log"
    command = [sys.executable, "-m", "pdproxy", "up", "--engine", kind, "--model", model, "--python", python]
    command += ["--device", "cpu", "--dtype", "float32", "--chunk-size", "32", "--engine-args", ENGINE_ARGS]
    command += ["--pd-buffer-size", "64MiB"] if kind == OURS else []
    command += ["--timeout", str(START_TIMEOUT_S), "--work-dir", folder / "work", "--once", "--"]
    command += [sys.executable, "-m", "scripts.dev.bench_vllm_transfer.measure", file, str(seed)]
    environ = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environ["TMPDIR"] = str(folder)  # vLLM leaves its sockets and meeting points there
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environ, check=False).returncode
    if status or not file.is_file():
        sys.exit(f"error: {kind} ended with {status}:\n{log.read_text(errors='replace')[-3000:]}")
    measured: dict[str, Any] = json.loads(file.read_text())
    return measured


def _make_model(folder: Path) -> Path:
    from transfer.engine.tiny import make_tiny_model

    return make_tiny_model(folder, "qwen3", vocabulary="ascii", max_model_len=2048)


def _installed() -> Path:
    """Returns the Python of vLLM's environment, which is made where there is none."""
    script = ROOT / "scripts" / "install_vllm.py"
    told = subprocess.run([sys.executable, "-I", script], stdout=subprocess.PIPE, check=False, text=True)
    if told.returncode:
        sys.exit(told.returncode)
    return Path(told.stdout.splitlines()[-1])
