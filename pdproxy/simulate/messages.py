"""What simulated engines are asked and answer: one struct each, as short as can be."""

from __future__ import annotations

import msgspec

FACTS = "/facts"
CANCEL = "/cancel"


class PrefillAsk(msgspec.Struct, array_like=True):
    """Read a prompt, and bring its KV to the process `epoch` of `decoder`; to nobody where that is ``""``."""

    attempt: str
    decoder: str
    epoch: str
    num_tokens: int
    num_answer_tokens: int = 0
    """Of them: an answer's, whose beginning was shown before."""
    group: int | None = None
    """Names a prefix of `num_shared` tokens that it has in common with others."""
    num_shared: int = 0


class DecodeAsk(msgspec.Struct, array_like=True):
    """Write an answer of `num_tokens`, of which `num_shown` were shown before; the next one is the prefiller's."""

    attempt: str
    """``""``: read the prompt yourself."""
    num_tokens: int
    num_shown: int
    num_prompt_tokens: int


class CancelAsk(msgspec.Struct, array_like=True):
    """Drop what you have of it."""

    attempt: str


class Told(msgspec.Struct, array_like=True):
    """An engine's word about itself."""

    name: str
    role: str
    epoch: str
    num_pages: int
    chunk_size: int
    num_occupied: int = 0
    """Pages of its PD buffer that are in use; 0 for a prefiller."""


prefill_ask = msgspec.msgpack.Decoder(PrefillAsk)
decode_ask = msgspec.msgpack.Decoder(DecodeAsk)
cancel_ask = msgspec.msgpack.Decoder(CancelAsk)
told = msgspec.msgpack.Decoder(Told)
encode = msgspec.msgpack.Encoder().encode
