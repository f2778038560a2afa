"""The module reads what vLLM says of itself in ``GET /metrics``: its KV cache's size, how much of it is taken, which
process it is.

It uses expressions instead of a parser of the whole page, which has a thousand lines and is looked at every second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdproxy.engines.adapter import MalformedReply

_SAMPLE = r"^{name}(?:\{{(?P<labels>.*)\}})?[ \t]+(?P<value>[^ \t\n]+)[^\n]*$"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_CONFIG = "vllm:cache_config_info"
_USAGE, _OLD_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
_STARTED = "process_start_time_seconds"
_NULL_BLOCKS = 1
"""The number of blocks that vLLM keeps for itself."""
_ROUNDING = 1e-6
"""The part of a block by which a share of the cache may miss a whole number, since vLLM computes it in floating point.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """`VllmMetrics` are the numbers of one data-parallel rank."""

    num_gpu_blocks: int
    """The number of blocks of the KV cache. A data-parallel engine tells those of all ranks together, on each rank's
    line (seen with vLLM 0.32).
    """
    block_size: int
    """The number of tokens per block."""
    num_tokens: int | None
    """The number of tokens that one rank's KV cache has room for; None where it is not told."""
    usage: float | None
    """The share of the blocks that is taken, from 0 to 1; None where it is not told. With several ranks it is the
    fullest one's.

    Blocks that only the prefix cache remembers are not taken.
    """
    process_start: str | None
    """The time at which the process began, as the metrics page writes it. A different value means a different process.
    None where it is not told (with several API servers).
    """
    labels: Mapping[str, str]
    """The whole configuration of the cache, by vLLM's names."""

    @property
    def num_usable_blocks(self) -> int:
        """Returns the usable blocks of one rank, of `block_size` tokens each.

        Where the cache has room for fewer tokens than its blocks would hold, the tokens count: a hybrid model takes
        several blocks for the same tokens.
        """
        limit = self.num_gpu_blocks if self.num_tokens is None else self.num_tokens // self.block_size
        return max(0, min(self.num_gpu_blocks, limit) - _NULL_BLOCKS)

    @property
    def num_used_blocks(self) -> int | None:
        """Returns how many of the usable blocks are taken, rounded down; None where the usage is not told."""
        return None if self.usage is None else int(self.usage * self.num_usable_blocks + _ROUNDING)


def read_metrics(text: bytes, rank: int | None = None) -> VllmMetrics:
    """Reads the metrics page. `rank` says whose numbers to take, where an address serves several ranks; None means the
    first one's.

    Raises `MalformedReply`.
    """
    page = text.decode(errors="replace")
    configs = [labels for labels, _ in _samples(page, _CONFIG, rank)]
    if not configs:
        whose = "" if rank is None else f" of engine {rank}"
        raise MalformedReply(
            f"its /metrics has no {_CONFIG}{whose}: vLLM leaves it out with --disable-log-stats, and no option of the "
            "proxy stands in for it; start vLLM without that"
        )
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
    """Returns labels and value of each sample of this name, for the engine `rank`, or for all engines."""
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
    """Returns a number from 0 to 1, or None for anything else."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None
