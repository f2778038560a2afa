"""The compose file: valid by its specification, and its commands make a fleet that serves."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdproxy.config.settings import load
from pdproxy.serve import ABORT_S
from tests.e2e.cluster import Cluster, free_ports, started
from tests.helpers.manifests import ROOT

FILE = ROOT / "examples" / "compose" / "compose.yaml"
KEY = "${PDPROXY_ATTEMPT_KEY:?64 hexadecimal digits, as openssl rand -hex 32 makes them}"


def compose() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return told


def check(told: dict[str, Any]) -> None:
    if importlib.util.find_spec("compose_spec") is None:
        pytest.skip("NOT TESTED against the specification of compose files: pip install compose-spec (extra: dev)")
    from compose_spec import PyCompose

    PyCompose.from_yaml(yaml.safe_dump(told)).validate()


def test_it_is_a_compose_file() -> None:
    check(compose())


def test_the_specification_finds_a_mistake() -> None:
    told = compose()
    told["services"]["proxy"]["stop_grace_perod"] = "4s"
    with pytest.raises(ValueError, match="stop_grace_perod"):
        check(told)


def test_names_lead_somewhere() -> None:
    told = compose()
    for service in told["services"].values():
        build = service["build"]
        assert (FILE.parent / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert set(service.get("depends_on", [])) <= told["services"].keys()
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= told["volumes"].keys()


def test_who_leaves_has_the_time() -> None:
    proxy = compose()["services"]["proxy"]
    settings = load(proxy["command"][1:])
    limit_s = float(proxy["stop_grace_period"].removesuffix("s"))
    assert limit_s > settings.drain_grace_s + settings.drain_timeout_s + ABORT_S


@pytest.mark.engine
async def test_its_commands_make_a_fleet(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes of this machine, with its addresses in place of the services' names."""
    services = compose()["services"]
    for name, variable in (("decode", "PDENGINE_ATTEMPT_KEY"), ("proxy", "PDPROXY_ATTEMPT_KEY")):
        assert services[name]["environment"] == {variable: KEY}
    key = secrets.token_hex(32)
    ports = dict(zip(("prefill", "decode", "proxy"), free_ports(3), strict=True))
    with started(tiny_model(), tmp_path) as cluster:
        for name in ("prefill", "decode", "proxy"):
            _start(cluster, name, services[name]["command"], ports, key)
        await cluster.wait_ready()
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"model": cluster.model.name, "prompt": "a b " * 200, "max_tokens": 4}
            reply = await client.post(f"{cluster.proxy}/v1/completions", json=body)
            assert (reply.status_code, reply.headers["x-pdproxy-path"]) == (200, "disaggregated"), reply.text
        await cluster.settled()


def _start(cluster: Cluster, name: str, command: list[str], ports: dict[str, int], key: str) -> None:
    here = {f"{one}:{old}": f"127.0.0.1:{ports[one]}" for one, old in (("prefill", "7100"), ("decode", "7200"))}
    here |= {"/models/tiny-model": str(cluster.model)}
    words = list(command)
    for old, new in here.items():
        words = [word.replace(old, new) for word in words]
    for option, value in (("--port", str(ports[name])), ("--host", "127.0.0.1"), ("--notify-host", "127.0.0.1")):
        if option in words:
            words[words.index(option) + 1] = value
    file = cluster.folder / "attempt.key"
    file.write_text(key)
    file.chmod(0o600)
    role = name if name != "proxy" else "proxy"
    words = ["pdproxy", *words] if name == "proxy" else words
    cluster.start(name, role, ports[name], words if name == "prefill" else [*words, "--attempt-key-file", str(file)])
