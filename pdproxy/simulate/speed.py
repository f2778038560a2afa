"""The module says how fast the engines are: a prediction rests on these few numbers.

Prefill and decode are affine functions of tokens and of batch, a transfer is latency and bytes over bandwidth. That is
little enough to be fitted from one load test (`fit.py`), and to be told in a table.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from pdproxy.simulate.errors import SimulationError


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed holds an engine's numbers, in seconds, tokens and bytes. The defaults are round numbers of the order of an
    8B model on one large GPU each. It raises `ValueError` for numbers that cannot be."""

    prefill_s: float = 0.010
    """Holds the seconds that a batch of prompts takes, whatever is in it."""
    prefill_token_s: float = 0.000_050
    """Holds the seconds that each token of the batch adds."""
    prefill_batch_tokens: int = 8192
    """Holds the tokens of a batch: prompts that together have at most this many tokens are read at once; a longer one
    is read alone."""
    prefix_cache_tokens: int = 1_000_000
    """Holds the tokens of shared prefixes that a prefiller keeps."""

    transfer_s: float = 0.002
    """Holds the seconds from the end of a prompt's prefill to its first byte at the decoder."""
    kv_token_bytes: int = 131_072
    link_bytes_per_s: float = 20e9
    """Holds the bandwidth into one decoder, which takes one prompt's KV after the other."""

    step_s: float = 0.008
    """Holds the seconds that a decoder's step takes, however few sequences it writes."""
    step_sequence_s: float = 0.000_100
    """Holds the seconds that each sequence adds to the step."""
    step_token_s: float = 0.0
    """Holds the seconds that each token which these sequences have so far, prompts included, adds to the step."""
    max_batch: int = 256
    """Holds the number of sequences that a decoder writes at once; the others wait, their KV in the PD buffer."""

    kv_cache_bytes: int = 64 << 30
    """Holds the bytes of a decoder's own KV cache, in which it writes answers, `kv_token_bytes` for each token. Where
    there is none left, the latest answer gives way, and is read again when there is. With 0 there is always some."""
    pd_buffer_pages: int = 2048
    chunk_size: int = 256
    """Holds the number of tokens of a page."""
    overhead_s: float = 0.0
    """Holds the seconds that clients, network and servers need for themselves, before a request's prompt is read."""

    def __post_init__(self) -> None:
        for name in ("prefill_batch_tokens", "max_batch", "pd_buffer_pages", "chunk_size", "link_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        steps = ("step_s", "step_sequence_s", "step_token_s")
        for name in ("prefill_s", "prefill_token_s", "transfer_s", *steps, "overhead_s"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} must not be negative")
        if self.step_s + self.step_sequence_s <= 0.0:
            raise ValueError("step_s and step_sequence_s: a step takes some time")
        if self.kv_token_bytes < 0 or self.prefix_cache_tokens < 0 or self.kv_cache_bytes < 0:
            raise ValueError("kv_token_bytes, kv_cache_bytes, prefix_cache_tokens must not be negative")

    def prefill_takes(self, num_tokens: int) -> float:
        """Returns the seconds that a batch of `num_tokens` tokens takes."""
        return self.prefill_s + self.prefill_token_s * num_tokens

    def transfer_takes(self, num_tokens: int) -> float:
        """Returns the seconds that the KV of `num_tokens` tokens takes on the link alone."""
        return self.kv_token_bytes * num_tokens / self.link_bytes_per_s

    def step_takes(self, num_sequences: int, num_tokens: float = 0.0) -> float:
        """Returns the seconds of a step of so many sequences, which have `num_tokens` tokens together."""
        return self.step_s + self.step_sequence_s * num_sequences + self.step_token_s * num_tokens

    @property
    def kv_cache_tokens(self) -> int:
        """Returns how many tokens a decoder's KV cache has room for; 0 where there is always some."""
        return self.kv_cache_bytes // self.kv_token_bytes if self.kv_token_bytes else 0


def read_speed(path: Path) -> Speed:
    """Returns the speed from a TOML or JSON file with any of the numbers. Raises `SimulationError`."""
    try:
        text = path.read_text()
        given = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(given.get("speed", given), Speed)
    except OSError as error:
        raise SimulationError(f"speed: {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, ValueError) as error:
        raise SimulationError(f"speed: {path}: {error}") from None


def changed(speed: Speed, assignments: str) -> Speed:
    """Returns the speed with assignments like ``prefill_token_s=0.0001,max_batch=64`` changed in it. Raises
    `SimulationError`."""
    given = msgspec.to_builtins(speed)
    for part in filter(None, (part.strip() for part in assignments.split(","))):
        name, is_assigned, value = part.partition("=")
        if not is_assigned or name.strip() not in given:
            raise SimulationError(f"speed: {part!r} is not NAME=NUMBER with one of {', '.join(given)}")
        given[name.strip()] = value.strip()
    try:
        return msgspec.convert(given, Speed, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise SimulationError(f"speed: {error}") from None
