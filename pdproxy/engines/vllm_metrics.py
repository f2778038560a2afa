"""What vLLM says of itself in ``GET /metrics``: the size of its KV cache, how much of it is taken, which process it is.

Read with expressions instead of a parser of the whole page, which is of a thousand lines and looked at every second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdproxy.engines.base import MalformedReply

_SAMPLE = r"^{name}(?:\{{(?P<labels>.*)\}})?[ \t]+(?P<value>[^ \t\n]+)[^\n]*$"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_CONFIG = "vllm:cache_config_info"
_USAGE, _OLD_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
_STARTED = "process_start_time_seconds"
_NULL_BLOCKS = 1
"""Of its blocks vLLM keeps one for itself."""
_ROUNDING = 1e-6
"""Blocks by which a share of the cache may miss a whole number, since vLLM works it out in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """Of one data-parallel rank."""

    num_gpu_blocks: int
    """Of the KV cache. Of a data-parallel engine, of all ranks together (seen with vLLM 0.32), on each rank's line."""
    block_size: int
    """Tokens per block."""
    num_tokens: int | None
    """That one rank's KV cache has room for. None where it is not told."""
    usage: float | None
    """Of the blocks, the share that is taken: 0 to 1. Of several ranks, the fullest one's. None where it is not told.
    Blocks that only the prefix cache remembers are not taken."""
    process_start: str | None
    """When the process began, as it is written there: another value, another process. None where it is not told (with
    several API servers)."""
    labels: Mapping[str, str]
    """All of the cache's configuration, by vLLM's names."""

    @property
    def num_usable_blocks(self) -> int:
        """Of one rank, of `block_size` tokens each. Where the cache has room for fewer tokens than its blocks would
        hold, those count: a hybrid model takes several blocks for the same tokens."""
        limit = self.num_gpu_blocks if self.num_tokens is None else self.num_tokens // self.block_size
        return max(0, min(self.num_gpu_blocks, limit) - _NULL_BLOCKS)

    @property
    def num_used_blocks(self) -> int | None:
        """Blocks of the usable ones that are taken, rounded down. None where the usage is not told."""
        return None if self.usage is None else int(self.usage * self.num_usable_blocks + _ROUNDING)


def read_metrics(text: bytes, rank: int | None = None) -> VllmMetrics:
    """`rank`: whose numbers, where an address serves several; None: the first one's. Raises `MalformedReply`."""
    page = text.decode(errors="replace")
    configs = [labels for labels, _ in _samples(page, _CONFIG, rank)]
    if not configs:
        whose = "" if rank is None else f" of engine {rank}"
        raise MalformedReply(f"its /metrics has no {_CONFIG}{whose}")
    usage = _samples(page, _USAGE, rank) or _samples(page, _OLD_USAGE, rank)
    started = [value for _, value in _samples(page, _STARTED, None)]
    return VllmMetrics(
        num_gpu_blocks=_count(configs[0], "num_gpu_blocks"),
        block_size=_count(configs[0], "block_size"),
        num_tokens=_tokens(configs[0]),
        usage=max((share for _, value in usage if (share := _share(value)) is not None), default=None),
        process_start=started[0] if started else None,
        labels=configs[0],
    )


def _samples(page: str, name: str, rank: int | None) -> list[tuple[dict[str, str], str]]:
    """Labels and value of each sample of this name, of the engine `rank`, or of all of them."""
    found = re.finditer(_SAMPLE.format(name=re.escape(name)), page, re.MULTILINE)
    samples = [(dict(_LABEL.findall(each["labels"] or "")), each["value"]) for each in found]
    return [sample for sample in samples if rank is None or sample[0].get("engine") == str(rank)]


def _count(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    if not text.isdecimal() or int(text) < 1:
        raise MalformedReply(f"its /metrics says {name}={text!r} in {_CONFIG}")
    return int(text)


def _tokens(labels: Mapping[str, str]) -> int | None:
    text = labels.get("kv_cache_size_tokens", "")
    return int(text) if text.isdecimal() else None


def _share(text: str) -> float | None:
    """A number from 0 to 1, or None for anything else."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None
