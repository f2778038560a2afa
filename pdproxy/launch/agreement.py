"""The module checks whether engines would understand one another, before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.launch.errors import PreflightError
from pdproxy.launch.kinds.base import EnginePlan


def check_agreement(engines: Sequence[EnginePlan]) -> None:
    """Checks the engines of a fleet that options describe. The engines of one role are alike by construction, so it
    looks at one of each. Raises `PreflightError` where they differ."""
    prefiller, decoder = (next(one for one in engines if one.seat.role == role) for role in ("prefill", "decode"))
    for one, other in zip(prefiller.traits, decoder.traits, strict=True):
        if one.value != other.value:
            raise PreflightError(
                f"{one.source}: {one.what} is {one.value} for the prefillers and {other.value} for the decoders, "
                f"and must be the same; {one.remedy}"
            )


def check_all_agree(engines: Sequence[EnginePlan]) -> None:
    """Checks the engines of a fleet that a file describes: all that have the same model must agree, for each of them
    may be paired with each. Raises `PreflightError`."""
    first: dict[object, EnginePlan] = {}
    for engine in engines:
        other = first.setdefault(engine.tables[0]["model"], engine)
        for its, others in zip(engine.traits, other.traits, strict=True):
            if its.value != others.value:
                raise PreflightError(
                    f"{its.what} is {others.value} for {other.seat.name!r} and {its.value} for {engine.seat.name!r}, "
                    "and must be the same"
                )
