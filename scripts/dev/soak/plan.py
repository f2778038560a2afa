"""The module says what a soak starts, and with which options. The engines' times are so short that a minute sees many
faults run their course."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdproxy.config.values import Role
from pdproxy.launch.machine import environment
from pdproxy.launch.ports import HOST, free_ports
from pdproxy.launch.process import Program
from transfer.geometry import kv_geometry, load_config

MODEL = "tiny"
PROXY = "proxy"

CHUNK_SIZE = 16
MAX_MODEL_LEN = 512
DTYPE = "float64"
"""The dtype of the model, which is this exact so that two ways to the same token do not part over a rounding error."""
BUFFER_PAGES = 24
SMALL_BUFFER_PAGES = 6
"""The number of pages of the first decoder's buffer, which is always full, and too small for many prompts."""

ENGINE_TIMES = ("--heartbeat-s", "0.5", "--writer-timeout-s", "3")
REQUEST_TIMEOUT_S = 15.0
CLIENT_TIMEOUT_S = 40.0
"""The seconds after which a request counts as hung: by then the proxy has broken every deadline it has."""
ENGINE_LEASE_S = 15.0
FREEZE_LIMIT_S = 7.0
"""The longest freeze in seconds: longer than a writer's timeout, shorter than the time after which the proxy takes a
decoder's pages as free."""
KV_TIMEOUT_S = 2.5
PROXY_OPTIONS = (
    *("--request-timeout-s", str(REQUEST_TIMEOUT_S)),
    *("--slot-timeout-s", "6"),
    *("--prefill-timeout-s", "5"),
    *("--kv-timeout-s", str(KV_TIMEOUT_S)),
    *("--first-byte-timeout-s", "5"),
    *("--idle-timeout-s", "5"),
    *("--connect-timeout-s", "1"),
    *("--engine-lease-s", str(ENGINE_LEASE_S)),
    *("--probe-interval-s", "0.5"),
    *("--probe-timeout-s", "2"),
    *("--drain-grace-s", "0"),
    *("--drain-timeout-s", "3"),
)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """EnginePlan is one engine; it has the same ports again after each restart."""

    name: str
    role: Role
    port: int
    receiver_port: int
    pages: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan is everything that is started."""

    model: Path
    page_bytes: int
    engines: tuple[EnginePlan, ...]
    port: int
    signal_port: int
    """The port on which the proxy listens for KV signals."""
    relay_port: int
    """The port to which decoders send their KV signals."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def of_role(self, role: Role) -> list[str]:
        return [engine.name for engine in self.engines if engine.role == role]

    def engine(self, name: str) -> EnginePlan:
        return next(engine for engine in self.engines if engine.name == name)


def make_plan(model: Path, *, num_prefillers: int, num_decoders: int, seed: int, page_bytes: int) -> Plan:
    """Returns a plan with ports that are free when they are chosen. Raises `PreflightError` where there are none."""
    ports = iter(free_ports(3 + num_prefillers + 2 * num_decoders, random.Random(f"{seed} ports")))
    prefillers = [EnginePlan(f"prefill-{i}", "prefill", next(ports), 0, 0) for i in range(num_prefillers)]
    decoders = [
        EnginePlan(f"decode-{i}", "decode", next(ports), next(ports), BUFFER_PAGES if i else SMALL_BUFFER_PAGES)
        for i in range(num_decoders)
    ]
    return Plan(
        model=model,
        page_bytes=page_bytes,
        engines=(*prefillers, *decoders),
        port=next(ports),
        signal_port=next(ports),
        relay_port=next(ports),
    )


def measure_page(model: Path) -> int:
    """Returns the bytes of one chunk in the engines' dtype. Raises `GeometryError`."""
    return kv_geometry(load_config(model), kv_cache_dtype=DTYPE, cache="expanded").page_bytes(CHUNK_SIZE)


def engine_program(plan: Plan, engine: EnginePlan) -> Program:
    flags = [*("--role", engine.role), *("--model", str(plan.model)), *("--served-model-name", MODEL)]
    flags += [*("--port", str(engine.port)), *("--chunk-size", str(CHUNK_SIZE)), *("--dtype", DTYPE)]
    flags += [*("--max-model-len", str(MAX_MODEL_LEN)), *("--kv-cache-size", "128MiB"), *ENGINE_TIMES]
    if engine.role == "decode":
        size = str(engine.pages * plan.page_bytes)
        flags += [*("--receiver-port", str(engine.receiver_port)), *("--pd-buffer-size", size)]
    return _program(engine.name, ["-m", "transfer.engine", *flags], f"{engine.url}/health")


def proxy_program(plan: Plan) -> Program:
    urls = {role: ",".join(e.url for e in plan.engines if e.role == role) for role in ("prefill", "decode")}
    flags = [*("--prefill", urls["prefill"]), *("--decode", urls["decode"]), *("--model", str(plan.model))]
    flags += [*("--port", str(plan.port)), *("--proxy-port", str(plan.signal_port))]
    flags += [*("--notify-port", str(plan.relay_port)), *("--chunk-size", str(CHUNK_SIZE)), *PROXY_OPTIONS]
    return _program(PROXY, ["-m", "pdproxy", "serve", *flags], f"{plan.url}/ready")


def listening_proxy_program(plan: Plan) -> Program:
    """Returns the same proxy's program, which counts as started as soon as it listens. The engines' state then decides
    which requests it can serve."""
    return replace(proxy_program(plan), ready_url=f"{plan.url}/status")


def _program(name: str, arguments: Sequence[str], ready_url: str) -> Program:
    return Program(name=name, command=(sys.executable, *arguments), ready_url=ready_url, env=environment("cpu"))
