"""The module reads what vLLM says of itself in ``GET /metrics``: its KV cache's size, how much of it is taken, which
process it is.

It uses expressions instead of a parser of the whole page, which has a thousand lines and is looked at every second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.engines.adapter import MalformedReply

log = logging.getLogger(__name__)

_SAMPLE = r"^{name}(?:\{{(?P<labels>.*)\}})?[ \t]+(?P<value>[^ \t\n]+)[^\n]*$"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_CONFIG = "vllm:cache_config_info"
_USAGE, _OLD_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
_WAITING = "vllm:num_requests_waiting"
_STARTED = "process_start_time_seconds"
_COUNTS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
"""The counters that grow with every request, whoever sends it. Several API servers tell them together."""
_OWNED_BY_VLLM = re.compile(rb'"owned_by"\s*:\s*"vllm"')
UNKNOWN_BLOCKS = 1 << 30
"""The number of blocks that stands for a cache of which nobody knows the size: so many that nothing waits for them."""
_NULL_BLOCKS = 1
"""The number of blocks that vLLM keeps for itself."""
_ROUNDING = 1e-6
"""The part of a block by which a share of the cache may miss a whole number, since vLLM computes it in floating point.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """`VllmMetrics` are the numbers of one data-parallel rank."""

    num_gpu_blocks: int
    """The number of blocks of one rank's KV cache."""
    block_size: int | None
    """The number of tokens per block; None where nobody knows it."""
    num_tokens: int | None
    """The number of tokens that one rank's KV cache has room for; None where it is not told."""
    usage: float | None
    """The share of the blocks that is taken, from 0 to 1; None where it is not told. With several ranks it is the
    fullest one's.

    Blocks that only the prefix cache remembers are not taken.
    """
    num_meant: int = 1
    """The number of data-parallel ranks that are meant: all of the engine's, where none is named."""
    usage_sum: float | None = None
    """The shares of all of them added up; None where they are not told."""
    num_waiting: int
    """The number of requests that wait for their turn, among them those that were preempted."""
    process_start: str | None
    """The time at which the process began, as the metrics page writes it. A different value means a different process.
    None where it is not told (with several API servers).
    """
    counts: tuple[float, ...] = ()
    """The tokens that all ranks have read and written since their start, where the time of that is not told."""
    num_ranks: int = 1
    """The number of data-parallel ranks behind the address."""
    labels: Mapping[str, str]
    """The whole configuration of the cache, by vLLM's names."""

    @property
    def num_usable_blocks(self) -> int:
        """Returns the usable blocks of one rank, of `block_size` tokens each.

        Where the cache has room for fewer tokens than its blocks would hold, the tokens count: a hybrid model takes
        several blocks for the same tokens.
        """
        limit = self.num_gpu_blocks
        if self.num_tokens is not None and self.block_size is not None:
            limit = self.num_tokens // self.block_size
        return max(0, min(self.num_gpu_blocks, limit) - _NULL_BLOCKS)

    @property
    def cache(self) -> KvCache:
        """Returns what an engine tells of its KV cache, or of the caches of all its ranks; nothing where their size is
        not known."""
        block, num = self.block_size, self.num_usable_blocks
        if block is None or num < 1 or self.num_gpu_blocks >= UNKNOWN_BLOCKS:
            return UNKNOWN_CACHE
        used = None if self.usage_sum is None else int(self.usage_sum * num + _ROUNDING) * block
        return KvCache(num * self.num_meant * block, block, used, self.num_waiting > 0)

    @property
    def num_used_blocks(self) -> int | None:
        """Returns how many of the usable blocks are taken, rounded down; None where the usage is not told."""
        return None if self.usage is None else int(self.usage * self.num_usable_blocks + _ROUNDING)


@dataclass(frozen=True, slots=True)
class GivenCache:
    """A `GivenCache` is what the configuration says of an instance's KV cache; None where it does not say."""

    instance: str = ""
    num_blocks: int | None = None
    block_size: int | None = None


class CacheReader:
    """A `CacheReader` reads one instance's metrics. Where vLLM tells nothing of its cache (``--disable-log-stats``),
    what the configuration says counts; without that, no request waits for its blocks, and the log says so once.

    What must always hold: only an engine whose model cards are vLLM's is taken so. A violation would be seen as an
    engine of another kind that becomes ready as vLLM.

    Mutable state: whether the log was told.
    """

    def __init__(self, given: GivenCache, rank: int | None, num_ranks: int | None = None) -> None:
        """`rank` and `num_ranks` mean the same as in `read_metrics`."""
        self._given = given
        self._rank = rank
        self._num_ranks = num_ranks
        self._is_told = False

    def read(self, page: bytes, cards: bytes) -> VllmMetrics:
        """Returns the numbers of the metrics page. `cards` is the body of the instance's ``/v1/models``. Raises
        `MalformedReply`."""
        text = page.decode(errors="replace")
        if _samples(text, _CONFIG, None) or _OWNED_BY_VLLM.search(cards) is None:
            return read_metrics(page, self._rank, self._num_ranks)
        given = self._given
        if given.num_blocks is None and not self._is_told:
            self._is_told = True
            log.warning(
                "%s does not tell the size of its KV cache (vLLM's --disable-log-stats): no request waits for its "
                "blocks; give num_blocks and chunk_size in its table, or start vLLM without that option",
                given.instance,
            )
        return VllmMetrics(
            num_gpu_blocks=UNKNOWN_BLOCKS if given.num_blocks is None else given.num_blocks + _NULL_BLOCKS,
            block_size=given.block_size,
            num_tokens=None,
            usage=None,
            num_ranks=1,
            usage_sum=None,
            num_waiting=0,
            process_start=_started(text),
            labels={},
        )


def read_metrics(text: bytes, rank: int | None = None, num_ranks: int | None = None) -> VllmMetrics:
    """Reads the metrics page. `rank` says whose numbers to take, where an address serves several ranks; None means the
    first one's. `num_ranks` is the number of ranks that there should be, where it is known.

    Raises `MalformedReply`.
    """
    page = text.decode(errors="replace")
    configs = {labels.get("engine", ""): labels for labels, _ in _samples(page, _CONFIG, None)}
    if not configs:
        raise MalformedReply(
            f"its /metrics has no {_CONFIG}, and its model cards are not those of a vLLM that was started with "
            "--disable-log-stats"
        )
    engine = None if rank is None else _engine(list(configs), rank, num_ranks)
    config = next(iter(configs.values())) if engine is None else configs[engine]
    usage = _samples(page, _USAGE, engine) or _samples(page, _OLD_USAGE, engine)
    shares = [share for _, value in usage if (share := _share(value)) is not None]
    num_meant = len(configs) if engine is None else 1
    waiting = _samples(page, _WAITING, engine)
    started = _started(page)
    return VllmMetrics(
        # Each rank's line has the sum of all ranks' blocks (seen with vLLM 0.32).
        num_gpu_blocks=_count(config, "num_gpu_blocks") // len(configs),
        block_size=_count(config, "block_size"),
        num_tokens=_tokens(config),
        usage=max(shares, default=None),
        num_meant=num_meant,
        usage_sum=None if not shares else max(shares) if num_meant == 1 else min(float(num_meant), sum(shares)),
        num_waiting=sum(int(number) for _, value in waiting if (number := _number(value)) is not None),
        process_start=started,
        counts=() if started is not None else tuple(_total(page, name) for name in _COUNTS),
        num_ranks=len(configs),
        labels=config,
    )


def _engine(engines: list[str], rank: int, num_ranks: int | None) -> str:
    """Returns the name by which the page knows the rank: requests count the ranks behind an address from 0, and the
    page counts all ranks of a deployment, some of which may be elsewhere. Raises `MalformedReply`."""
    there = f"it has {len(engines)} data-parallel rank{'s' * (len(engines) > 1)}"
    if num_ranks not in (None, len(engines)):
        raise MalformedReply(f"{there}, and data_parallel_size is {num_ranks}")
    if rank >= len(engines):
        raise MalformedReply(f"{there}, and data_parallel_rank is {rank}")
    return sorted(engines, key=lambda engine: (len(engine), engine))[rank]


def _started(page: str) -> str | None:
    return next((value for _, value in _samples(page, _STARTED, None)), None)


def _total(page: str, name: str) -> float:
    return sum(number for _, value in _samples(page, name, None) if (number := _number(value)) is not None)


def _samples(page: str, name: str, engine: str | None) -> list[tuple[dict[str, str], str]]:
    """Returns labels and value of each sample of this name, for the rank `engine`, or for all ranks."""
    found = re.finditer(_SAMPLE.format(name=re.escape(name)), page, re.MULTILINE)
    samples = [(dict(_LABEL.findall(each["labels"] or "")), each["value"]) for each in found]
    return [sample for sample in samples if engine is None or sample[0].get("engine") == engine]


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
    share = _number(text)
    return share if share is not None and 0.0 <= share <= 1.0 else None


def _number(text: str) -> float | None:
    """Returns a finite number, or None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
