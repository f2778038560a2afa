"""Checks of fleets that are found: by a real name server, and by a stand-in for a cluster's API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.cli import app
from pdproxy.config.settings import load
from pdproxy.discovery import cluster
from pdproxy.inspection import found_fleet
from pdproxy.inspection.findings import Report
from pdproxy.inspection.found_fleet import find_fleet
from tests.fakes.kubernetes_api import KubernetesApi, pod
from tests.helpers.name_server import NameServer
from tests.pdproxy.discovery.conftest import kubeconfig
from transfer.command_line.commands import exit_status


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_fleet, "FIND_S", 3.0)
    monkeypatch.setattr(found_fleet, "QUIET_S", 0.3)
    monkeypatch.setattr(cluster, "MAX_PAUSE_S", 0.2)


def told(report: Report) -> list[tuple[str, str]]:
    return [(one.problem, one.why) for one in report.findings]


def test_the_instances_behind_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with NameServer(tmp_path) as server:
        server.set(prefill=["127.0.0.21", "127.0.0.22"])
        options = ["--dns-server", server.address, "--prefill", f"dns+http://prefill.{server.zone}:1"]
        options += ["--decode", f"dns+http://decode.{server.zone}:2", "--json"]
        assert exit_status(app, "pdproxy", ["check", *options]) == 1
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        names = {f"prefill-0-127.0.0.{number}" for number in (21, 22)}
        assert {one["name"] for one in report["instances"]} == names
        found = [(one["problem"], one["why"]) for one in report["findings"]]
        assert ("not_found", "no decode instance was found within 3 s") in found
        assert {one["instances"][0] for one in report["findings"] if one["problem"] == "unreachable"} == names


async def test_pods_and_given_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--discover", "kubernetes", "--prefill-selector", "role=p", "--decode-selector", "role=d"]
    async with KubernetesApi() as api:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.url)))
        for name, role in (("a", "p"), ("b", "d"), ("c", "d")):
            api.put("pods", pod(name, f"10.0.0.{ord(name)}", ports={"http": 8000}, role=role))
        report = Report("x")
        fleet = await find_fleet(load([*options, "--decode", "http://10.0.0.99:8000"]), report)
        assert fleet is not None
        assert {one.name for one in fleet} == {"decode-0", "a", "b"}, "c has the address of decode-0"
        assert told(report) == []

        api.faults.list_status = [(403, {})] * 100
        fleet = await find_fleet(load(options), report)
        assert fleet == ()
        assert any("HTTP 403" in why for _, why in told(report))
        assert not report.is_good


async def test_where_nothing_is_looked_for() -> None:
    assert await find_fleet(load(["--prefill", "http://p:1", "--decode", "http://d:1"]), Report("x")) is None
