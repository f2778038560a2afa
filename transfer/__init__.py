"""KV custody and the NIXL transfer between a prefiller and a decoder.

These names are the library's public face; `docs/transfer.md` explains them with an example. Importing the package
imports neither torch nor NIXL: a name brings what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer.agents.mock import MockAgent, MockFabric
    from transfer.agents.nixl import NixlAgent
    from transfer.agents.nixl_options import NixlOptions
    from transfer.dataplane.in_process import InProcess
    from transfer.dataplane.own_process import OwnProcess
    from transfer.dataplane.plane import DataPlane
    from transfer.errors import AttemptLost, HandshakeRefused, PeerLost, ReservationRefused, TransferError
    from transfer.memory.buffer import PagedBuffer
    from transfer.memory.views import layer_views
    from transfer.plan.keys import chunk_keys
    from transfer.plan.layout import KvLayout, LayerKv
    from transfer.roles.handshake import Identity
    from transfer.roles.rank_slab import OtherSlabs, RankSlab
    from transfer.roles.receiver import Receiver, ReceiverConfig
    from transfer.roles.sender import Sender
    from transfer.trust import AttemptKey, FleetKey
    from transfer.wire import Endpoint, PushParams

_HOMES = {
    "agents.mock": ("MockAgent", "MockFabric"),
    "agents.nixl": ("NixlAgent",),
    "agents.nixl_options": ("NixlOptions",),
    "dataplane.in_process": ("InProcess",),
    "dataplane.own_process": ("OwnProcess",),
    "dataplane.plane": ("DataPlane",),
    "errors": ("AttemptLost", "HandshakeRefused", "PeerLost", "ReservationRefused", "TransferError"),
    "memory.buffer": ("PagedBuffer",),
    "memory.views": ("layer_views",),
    "plan.keys": ("chunk_keys",),
    "plan.layout": ("KvLayout", "LayerKv"),
    "roles.handshake": ("Identity",),
    "roles.rank_slab": ("OtherSlabs", "RankSlab"),
    "roles.receiver": ("Receiver", "ReceiverConfig"),
    "roles.sender": ("Sender",),
    "trust": ("AttemptKey", "FleetKey"),
    "wire": ("Endpoint", "PushParams"),
}
_HOME = {name: f"transfer.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "AttemptKey",
    "AttemptLost",
    "DataPlane",
    "Endpoint",
    "FleetKey",
    "HandshakeRefused",
    "Identity",
    "InProcess",
    "KvLayout",
    "LayerKv",
    "MockAgent",
    "MockFabric",
    "NixlAgent",
    "NixlOptions",
    "OtherSlabs",
    "OwnProcess",
    "PagedBuffer",
    "PeerLost",
    "PushParams",
    "RankSlab",
    "Receiver",
    "ReceiverConfig",
    "ReservationRefused",
    "Sender",
    "TransferError",
    "chunk_keys",
    "layer_views",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'transfer' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
