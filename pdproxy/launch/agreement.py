"""Whether prefillers and decoders would understand one another, seen before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.launch.errors import PreflightError
from pdproxy.launch.kinds.base import EnginePlan


def check_agreement(engines: Sequence[EnginePlan]) -> None:
    """The engines of one role are alike by construction, so that one of each is looked at."""
    prefiller, decoder = (next(one for one in engines if one.seat.role == role) for role in ("prefill", "decode"))
    for one, other in zip(prefiller.traits, decoder.traits, strict=True):
        if one.value != other.value:
            raise PreflightError(
                f"{one.source}: {one.what} is {one.value} for the prefillers and {other.value} for the decoders, "
                f"and must be the same; {one.remedy}"
            )
