"""The package says how an engine of each kind is started: command line, environment, files and ports, as values."""

from __future__ import annotations

from pdproxy.config.values import Engine
from pdproxy.launch.kinds.base import Kind
from pdproxy.launch.kinds.builtin import Builtin
from pdproxy.launch.kinds.lmcache import LMCache
from pdproxy.launch.kinds.mooncake import Mooncake
from pdproxy.launch.kinds.sglang import Sglang
from pdproxy.launch.kinds.vllm_nixl import VllmNixl
from pdproxy.launch.kinds.vllm_transfer import VllmTransfer

KINDS: dict[Engine, Kind] = {
    "builtin": Builtin(),
    "vllm_nixl": VllmNixl(),
    "vllm_transfer": VllmTransfer(),
    "lmcache": LMCache(),
    "sglang": Sglang(),
    "mooncake": Mooncake(),
}
