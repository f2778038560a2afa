"""The settings of a NIXL agent: its backends (NIXL's plugins), their own settings, and how often it looks for arrivals.

UCX itself reads its environment (``UCX_TLS``, ``UCX_NET_DEVICES``); nothing of that is repeated here. What it listens
on is to be restricted there, too: over TCP every agent has one listening socket per interface that UCX may use, bound
to that interface's own address (never to all of them) and to any free port, and it takes connections from all
that reach it. ``UCX_NET_DEVICES=lo`` leaves loopback alone, ``UCX_NET_DEVICES=eth1`` one network (measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BACKENDS = ("UCX",)
"""The backends that report a write as done only when its bytes are at the peer. KV-ready relies on that."""
_UNKNOWN = "it is not known to report a write as done only when its bytes are at the peer"
_NOT_YET = {
    "LIBFABRIC": "it reports a write as done when it has left, which over EFA is before its bytes are at the peer",
}
SPLIT_BATCH_SIZE = "16"
PROGRESS_DELAY_US = 10_000


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """`NixlOptions` holds the settings of one agent. Raises `ValueError` where the options contradict each other, and
    for a backend that is not one of `BACKENDS`.

    NIXL itself says whether it can fulfil them.
    """

    backends: tuple[str, ...] = BACKENDS
    """The backends that NIXL tries, in this order, as far as they can move the memory in question."""
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Holds, by backend, the settings of its plugin (``nixl_agent.get_plugin_params`` lists the usual ones; NIXL
    ignores unknown names). ``{"UCX": {"num_threads": "2"}}`` lets two threads copy. UCX hands out descriptors in
    batches of ``split_batch_size``, 1,024 by default, so that further threads would have nothing to do. Where
    `num_threads` is given and ``split_batch_size`` is not, 16 is chosen here. A write of fewer spans than that stays
    with one thread."""
    progress_delay_us: int = PROGRESS_DELAY_US
    """The time, in microseconds, for which a receiver's progress thread sleeps when nothing wakes it. Shared memory and
    RDMA writes land without it. Over plain TCP every write waits for it: there 1,000 makes a write of 64 KiB take 0.2
    ms instead of 5, and moves two to three times the bytes per second, for 2 % of a core in a receiver that is idle
    (measured)."""

    def __post_init__(self) -> None:
        if not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError(f"name one NIXL backend or more, each once, got {list(self.backends)}")
        for backend in self.backends:
            if backend not in BACKENDS:
                reason = _NOT_YET.get(backend, _UNKNOWN)
                raise ValueError(f"the NIXL backend {backend!r} is not used: {reason}; name {' or '.join(BACKENDS)}")
        strange = sorted(set(self.backend_options) - set(self.backends))
        if strange:
            raise ValueError(f"options for the NIXL backends {strange}, but only {list(self.backends)} are used")
        if self.progress_delay_us < 1:
            raise ValueError(f"a progress delay of {self.progress_delay_us} µs would use a whole core")

    def of(self, backend: str) -> dict[str, str]:
        """Returns the settings that `backend` is created with."""
        given = dict(self.backend_options.get(backend, {}))
        if backend == "UCX" and "num_threads" in given:
            given.setdefault("split_batch_size", SPLIT_BATCH_SIZE)
        return given
