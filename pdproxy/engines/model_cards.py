"""The module reads ``GET /v1/models``: under which names an engine serves its model, and how long a context it
allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdproxy.engines.adapter import MalformedReply
from pdproxy.openai.answer import ModelCard, read_cards

PATH = "/v1/models"


@dataclass(frozen=True, slots=True)
class ModelCards:
    names: frozenset[str]
    max_model_len: int | None
    """The most tokens of prompt and answer, as vLLM and SGLang tell it; None where no card tells it."""
    cards: tuple[ModelCard, ...]
    """The cards themselves, for clients of the proxy."""


def read_model_cards(body: bytes) -> ModelCards:
    """Reads the names and the smallest context length. Raises `MalformedReply`."""
    try:
        cards = read_cards(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {PATH} is not understood: {error}") from None
    lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
    return ModelCards(frozenset(card.id for card in cards), min(lengths, default=None), tuple(cards))
