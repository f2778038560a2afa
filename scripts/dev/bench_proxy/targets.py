"""The module says which proxies are measured, and how each is started: with one prefiller and one decoder, at its
quietest, at its cheapest.

A peer is an installed command; no peer's code is in here. Each is told not to log every request, and to choose among
its one prefiller and one decoder in the cheapest way it has.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.dev.bench_proxy.plan import Scenario

OURS, DIRECT, INTERPRETED = "pdproxy", "direct", "pdproxy-interpreted"
FLOOR = "floor"
"""The name of the target that makes only the system calls that no proxy can do without."""
EARLIER = "pdproxy-earlier"
"""The name of the target that is another checkout of pdproxy."""
OTHER_PYTHON = "pdproxy-python"
"""The name of the target that is pdproxy run by another Python."""
WORKERS = "pdproxy-workers"
"""The name of the target that is pdproxy with several processes."""
QUEUE_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place holds the ports of one target on this machine."""

    port: int
    metrics_port: int
    """The port for proxies that want one more."""
    prefill_port: int
    decode_port: int

    @property
    def prefill_url(self) -> str:
        return f"http://127.0.0.1:{self.prefill_port}"

    @property
    def decode_url(self) -> str:
        return f"http://127.0.0.1:{self.decode_port}"

    def urls(self, port: int, count: int) -> str:
        """Returns the first `count` engines at one of the two ports, as an option takes them. They are at loopback
        addresses, as the engine's program numbers them."""
        hosts = ("127.0.0.1", *(f"127.77.{number >> 8}.{number & 255}" for number in range(1, count)))
        return ",".join(f"http://{host}:{port}" for host in hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Peer is another proxy."""

    name: str
    package: str
    """Holds the peer's Python package, which its command names: two peers install a command of the same name."""
    command: str
    """Holds the command as it is called once it is installed, and where it is once it is found."""
    line: Callable[[str, Place, Scenario], tuple[str, ...]]
    takes_sglang: bool = False
    """True where the peer is made for SGLang's engines, not for vLLM's."""


def pdproxy_line(
    place: Place,
    scenario: Scenario,
    model: Path | None = None,
    *,
    num_workers: int = 1,
    python: str = sys.executable,
) -> tuple[str, ...]:
    """Returns pdproxy's command line. With a `model`'s folder it counts tokens with the tokenizer in there."""
    slots = scenario.slots
    waiting = () if slots is None else ("--concurrent-pages", str(slots), "--max-queue", str(scenario.clients))
    patience = () if slots is None else ("--slot-timeout-s", str(QUEUE_TIMEOUT_S))
    prefillers, decoders = (place.urls(port, scenario.num_pairs) for port in (place.prefill_port, place.decode_port))
    fleet = ("--engine", "vllm_nixl", "--prefill", prefillers, "--decode", decoders)
    serving = ("--port", str(place.port), "--proxy-port", "0", "--drain-grace-s", "0", "--log-level", "warning")
    counting = () if model is None else ("--model", str(model))
    more = (*scenario.options, *(() if num_workers == 1 else ("--workers", str(num_workers))))
    # -P: not the pdproxy of the working directory, but of PYTHONPATH.
    return (python, "-P", "-m", "pdproxy", "serve", *fleet, *serving, *waiting, *patience, *counting, *more)


def _vllm_router(command: str, place: Place, scenario: Scenario) -> tuple[str, ...]:
    return (
        *(command, "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--log-level", "warning"),
        *("--prefill", place.prefill_url, "--decode", place.decode_url),
        *_router_options(place, scenario),
    )


def _sglang_router(command: str, place: Place, scenario: Scenario) -> tuple[str, ...]:
    return (
        *(command, "launch", "--pd-disaggregation", "--log-level", "warn"),
        *("--prefill", place.prefill_url, "8998", "--decode", place.decode_url),
        *_router_options(place, scenario),
    )


def _smg(command: str, place: Place, scenario: Scenario) -> tuple[str, ...]:
    """Returns smg's command line. It is what has come of sglang-router; it lets through no more than some thousands at
    once unless it is told to."""
    all_at_once = ("--max-concurrent-requests", "0") if scenario.slots is None else ()
    return (*_sglang_router(command, place, scenario), *all_at_once)


def _router_options(place: Place, scenario: Scenario) -> tuple[str, ...]:
    slots = scenario.slots
    queue = ("--queue-size", str(scenario.clients), "--queue-timeout-secs", str(QUEUE_TIMEOUT_S))
    return (
        *("--host", "127.0.0.1", "--port", str(place.port), "--prometheus-port", str(place.metrics_port)),
        *("--policy", "round_robin"),
        *(() if slots is None else ("--max-concurrent-requests", str(slots), *queue)),
    )


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="vllm-router", package="vllm_router", command="vllm-router", line=_vllm_router),
        Peer(
            name="sglang-router",
            package="sglang_router",
            command="sglang-router",
            line=_sglang_router,
            takes_sglang=True,
        ),
        Peer(name="smg", package="smg", command="smg", line=_smg, takes_sglang=True),
    )
}
NOT_TO_BE_HAD = {
    "lmcache-example": "it is a file among LMCache's examples, which no release installs: there is nothing to start",
}


def floor_of(program: Path) -> Peer:
    """Returns the floor as a peer; `program` is compiled of ``floor.c``."""
    return Peer(name=FLOOR, package="", command=str(program), line=_floor)


def _floor(command: str, place: Place, scenario: Scenario) -> tuple[str, ...]:
    ports = {"port": place.port, "prefill_port": place.prefill_port, "decode_port": place.decode_port}
    return (command, *(f"{name}={port}" for name, port in ports.items()))


def choose(words: Sequence[str]) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can be started, of those named as ``NAME`` or ``NAME=COMMAND``, and why the others cannot.

    Raises `ValueError` for an unknown name.
    """
    there, missing = [], []
    for word in words:
        name, _, command = word.partition("=")
        if name not in PEERS and name not in NOT_TO_BE_HAD:
            raise ValueError(f"no peer is called {name!r}; there are {', '.join([*PEERS, *NOT_TO_BE_HAD])}")
        why = NOT_TO_BE_HAD.get(name)
        found = None if why else _find(command or PEERS[name].command)
        if found is not None and _is_of(PEERS[name].package, found):
            there.append(replace(PEERS[name], command=str(found)))
        else:
            missing.append(f"{name}: {why or _remedy(PEERS[name], found)}")
    return there, missing


def _find(command: str) -> Path | None:
    """Returns the command on the PATH, or beside the Python that runs this; None where there is none."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which(command) or shutil.which(command, path=beside)
    return None if path is None else Path(path)


def _is_of(package: str, command: Path) -> bool:
    """Tells whether a command is of this package; it is False for the script of another package."""
    text = command.read_bytes()
    return not text.startswith(b"#!") or f"from {package}".encode() in text


def _remedy(peer: Peer, found: Path | None) -> str:
    install = f"pip install {peer.name}"
    if found is None:
        return f"there is no command {peer.command}: {install}"
    return (
        f"{found} belongs to another package: {install} in an environment of its own, and {peer.name}=PATH/{peer.name}"
    )
