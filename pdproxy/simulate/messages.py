"""The module defines what simulated engines are asked and answer: one struct each, as short as can be."""

from __future__ import annotations

import msgspec

FACTS = "/facts"
CANCEL = "/cancel"


class PrefillAsk(msgspec.Struct, array_like=True):
    """PrefillAsk means: read a prompt, and bring its KV to the process `epoch` of `decoder`; if `decoder` is empty,
    bring it to nobody."""

    attempt: str
    decoder: str
    epoch: str
    num_tokens: int
    num_answer_tokens: int = 0
    """Counts those tokens of `num_tokens` that belong to an answer, whose beginning was shown before."""
    group: int | None = None
    """Holds the name of a prefix of `num_shared` tokens that the prompt has in common with others."""
    num_shared: int = 0


class DecodeAsk(msgspec.Struct, array_like=True):
    """DecodeAsk means: write an answer of `num_tokens`, of which `num_shown` were shown before; the next token is the
    prefiller's."""

    attempt: str
    """Holds the attempt whose KV is meant; an empty text tells the engine to read the prompt itself."""
    num_tokens: int
    num_shown: int
    num_prompt_tokens: int


class CancelAsk(msgspec.Struct, array_like=True):
    """CancelAsk means: drop what you have of this attempt."""

    attempt: str


class Told(msgspec.Struct, array_like=True):
    """Told is what an engine says about itself."""

    name: str
    role: str
    epoch: str
    num_pages: int
    chunk_size: int
    num_occupied: int = 0
    """Counts the pages of the engine's PD buffer that are in use; 0 for a prefiller."""
    num_cache_tokens: int = 0
    """Counts the tokens that a decoder's KV cache has room for; 0 where it does not say."""
    num_cache_used: int = 0
    """Counts the tokens that are there."""
    num_cache_waiting: int = 0
    """Counts the answers that wait for room there, or in the batch."""
    is_both: bool = False
    """Tells that it takes whichever role the proxy gives it."""


prefill_ask = msgspec.msgpack.Decoder(PrefillAsk)
decode_ask = msgspec.msgpack.Decoder(DecodeAsk)
cancel_ask = msgspec.msgpack.Decoder(CancelAsk)
told = msgspec.msgpack.Decoder(Told)
encode = msgspec.msgpack.Encoder().encode
