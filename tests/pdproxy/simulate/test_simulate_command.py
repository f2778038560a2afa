"""`pdproxy simulate` as somebody types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pdproxy.cli import app as cli
from pdproxy.loadtest.record import write_run
from pdproxy.simulate.command import app
from tests.pdproxy.simulate.test_fit import real_run

SMALL = ["--prefillers", "3", "--decoders", "4", "--requests", "300", "--seed", "5"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def found(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json", "-")
    assert result.exit_code == status, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_as_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    result = CliRunner().invoke(cli, ["simulate", *SMALL, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "seed 5" in result.stderr
    assert "TTFT" in result.stdout
    told = json.loads(path.read_text())
    assert told["requests"] == 300
    assert told["measured"] == 270
    assert told["seed"] == 5
    assert told["outcomes"] == {"done": 270}
    assert told["wall_s"] > 0


def test_a_seed_is_drawn_and_told() -> None:
    told = found("--requests", "20")
    again = found("--requests", "20", "--seed", str(told["seed"]))
    assert {**told, "wall_s": 0} == {**again, "wall_s": 0}


def test_the_load_makes_the_rate() -> None:
    half, whole = (found(*SMALL, "--load", load)["plan"]["rate"] for load in ("0.5", "1.0"))
    assert whole == pytest.approx(2 * half)
    assert found(*SMALL, "--rate", "3")["plan"]["rate"] == 3.0


def test_options_of_the_proxy_are_the_proxys() -> None:
    told = found(*SMALL, "--prefill-policy", "round_robin", "--options", "max-queue=7,admission=false")["plan"]
    assert told["prefill_policy"] == "round_robin"
    assert told["admission"] is False
    assert told["changed"]["max_queue"] == 7


def test_a_target_is_judged() -> None:
    told = found(*SMALL, "--slo", "ttft:p95<10,tpot:p95<1ms")
    assert [one["is_met"] for one in told["slo"]] == [True, False]
    assert told["good_share"] == 0.0


def test_a_run_shows_its_fleet_and_its_verdict() -> None:
    shown = invoke(*SMALL, "--slo", "ttft:p95<10,tpot:p95<1ms", "--markdown").stdout
    cells = dict(line.strip("| ").split(" | ") for line in shown.split("The fleet", 1)[1].splitlines()[4:] if line)
    told = found(*SMALL, "--slo", "ttft:p95<10,tpot:p95<1ms")
    assert cells["requests/s"] == f"{told['offered_per_s']:.4g}"
    assert cells["prefillers"] == f"{told['use']['prefillers_busy']['mean'] * 100:.1f} %"
    assert (cells["TTFT p95 < 10 s"], cells["TPOT p95 < 0.001 s"]) == ("met", "missed")
    assert cells["good"] == "0.0 %"


def test_a_simulation_without_one_answer_fails() -> None:
    result = invoke(*SMALL, "--requests", "20", "--patience-s", "0.001")
    assert result.exit_code == 1
    assert "no request was answered" in " ".join(result.stdout.split())


def test_pages_that_are_given_away_twice_are_a_failure() -> None:
    several = [*SMALL, "--proxies", "2", "--set", "pd_buffer_pages=12"]
    assert found(*several)["fronts"]["without_room"] == 0
    result = invoke(*several, "--options", "admission=false", "--load", "2")
    assert result.exit_code == 1
    assert "decoders had no room for" in result.stdout


def test_policies_are_compared() -> None:
    told = found("compare", *SMALL, "--policies", "round_robin,power_of_two")
    assert list(told["policies"]) == ["round_robin", "power_of_two"]
    assert told["requests"] == 600
    result = invoke("compare", *SMALL, "--policies", "round_robin,power_of_two", "--markdown")
    assert "| power_of_two |" in result.stdout


def test_a_knee_is_found() -> None:
    few = [*SMALL, "--requests", "80"]
    told = found("knee", *few)
    assert told["knee_per_s"] > 0
    assert told["is_bound"] is False
    assert told["target"].startswith(f"{told['slo']} (no --slo was given: 2 times the p95 of the unloaded fleet")
    assert found("knee", *few, "--slo", "ttft:p50<1ms", status=1)["knee_per_s"] is None


def test_a_knee_that_lies_above_all_rates_is_said_to() -> None:
    result = invoke("knee", "--requests", "5", "--seed", "1", "--slo", "ttft:p50<1000")
    assert "1p1d, TTFT p50 < 1000 s: every rate meets it, up to" in result.stdout


def test_no_figure_of_a_table_is_cut_where_there_is_no_terminal() -> None:
    assert "…" not in invoke("compare", *SMALL, "--requests", "40", "--policies", "round_robin").stdout


def test_a_size_is_found() -> None:
    told = found("size", "--requests", "300", "--seed", "1", "--rate", "60", "--slo", "ttft:p95<0.5,tpot:p95<20ms")
    assert told["prefillers"] >= 4
    assert told["best"]["plan"]["decoders"] == told["decoders"]


def test_a_speed_is_fitted_and_checked(tmp_path: Path) -> None:
    run, speed = tmp_path / "run.jsonl", tmp_path / "speed.json"
    write_run(real_run(), run)
    assert invoke("fit", str(run), "--json", str(speed)).exit_code == 0
    told = found("check", str(run), "--speed", str(speed), "--prefillers", "4", "--seed", "1")
    compared = told["runs"]["run.jsonl"]["compared"]
    assert set(compared["TTFT median (s)"]) == {"measured", "predicted", "error"}


def test_traces_faults_and_clients(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2024-05-10 00:00:{i:02}.0,{100 + i},{10 + i}\n" for i in range(20))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert found(*SMALL, "--trace", str(trace))["plan"]["arrivals"] == "trace"
    assert found(*SMALL, "--faults", "1 freeze decode-0 for 1", "--stragglers", "0.3x2")["slow"]
    assert found(*SMALL, "--clients", "4", "--think-s", "0.1")["in_flight"]["max"] == 4
    assert found(*SMALL, "--groups", "4", "--arrivals", "gamma", "--patience-s", "5")["plan"]["groups"] == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--slo", "itl:p50<1"], "tpot"),
        (["--slo", "fast"], "fast"),
        (["--prompt-tokens", "many"], "many"),
        (["--speed", "none.toml"], "none.toml"),
        (["--set", "max_batch=0"], "max_batch"),
        (["--options", "colour=red"], "colour"),
        (["--options", "colour"], "colour"),
        (["--decode-policy", "best"], "decode_policy"),
        (["--faults", "3 kill decode-77"], "decode-77"),
        (["--stragglers", "some"], "stragglers"),
        (["--trace", "none.csv"], "none.csv"),
        (["compare", "--policies", "best"], "best"),
        (["size"], "slo"),
        (["fit"], "JSON Lines"),
        (["check", "none.jsonl"], "none.jsonl"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments, "--requests", "10", "--seed", "1")
    assert result.exit_code == 2, result.output
    told = [line for line in result.stderr.splitlines() if not line.startswith("seed")]
    assert len(told) == 1
    assert complaint in told[0]


TURN = ("--prefillers", "2", "--decoders", "1", "--requests", "60", "--seed", "1", "--then", "20/40")


def test_roles_are_told_by_half() -> None:
    told = found("roles", *TURN, "--rate", "5", "--prompt-tokens", "400", "--answer-tokens", "10")
    assert set(told["splits"]) == {"1p2d", "2p1d", "controller, from 2p1d"}
    halves = told["splits"]["controller, from 2p1d"]["halves"]
    assert [half["outcomes"]["done"] for half in halves] == [24, 30]
    assert told["splits"]["1p2d"]["plan"]["then"] == "fixed:20 → fixed:40"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "it needs a --rate"), (("--rate", "5", "--clients", "2"), "--clients"), (("--then", "20"), "PROMPT/ANSWER")],
)
def test_a_turn_that_cannot_be(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*TURN, *arguments)
    assert result.exit_code != 0
    assert says in result.stderr
