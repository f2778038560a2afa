"""The module reads what goes wrong, and when, for the load test and for the simulation: ``30 kill decode-0; 60 start
decode-0; 40 freeze prefill-0 for 5``.

Each of them has a `Grammar`, which says what can be done to its instances. Times are in seconds. This module is pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pdproxy.loadtest.errors import LoadTestError

_ENDS = {"kill": "start", "freeze": "thaw", "slow": "slow", "cut": "mend"}
"""The fault that ends a fault, for each fault that can last for a while."""
_NUM_LISTED = 8
_FAULT = re.compile(
    r"(?P<at>\d+(?:\.\d+)?)s?\s+(?P<what>\w+)\s+(?P<whom>\S+)"
    r"(?:\s+by\s+(?P<by>\d+(?:\.\d+)?))?(?:\s+for\s+(?P<for>\d+(?:\.\d+)?)s?)?"
)


class FaultError(LoadTestError):
    """FaultError means that a schedule cannot be kept; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault is done to the instance `whom` at `at_s` seconds."""

    at_s: float
    what: str
    """Holds the verb."""
    whom: str
    slowness: float = 1.0
    """Holds the factor by which everything takes longer; only ``slow`` uses it."""
    for_s: float | None = None
    """Holds the seconds after which the fault ends by itself, for the verbs that can last."""

    def __str__(self) -> str:
        by = f" by {self.slowness:g}" if self.slowness != 1.0 else ""
        return f"{self.at_s:g} {self.what} {self.whom}{by}" + ("" if self.for_s is None else f" for {self.for_s:g}")

    def in_parts(self) -> Iterator[Fault]:
        """Yields the fault, and the fault that ends it, where it ends by itself."""
        yield replace(self, for_s=None)
        if self.for_s is not None:
            yield Fault(self.at_s + self.for_s, _ENDS[self.what], self.whom)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar says which `verbs` there are, and which of them may end by themselves after a while."""

    verbs: tuple[str, ...]
    lasting: tuple[str, ...]

    def parse(self, text: str) -> tuple[Fault, ...]:
        """Returns the faults of a schedule, in the order of their times. Raises `FaultError`."""
        parts = [part.strip() for part in re.split(r"[;\n]", text)]
        return tuple(sorted((self._fault(part) for part in parts if part), key=lambda fault: fault.at_s))

    def _fault(self, part: str) -> Fault:
        found = _FAULT.fullmatch(part)
        if (
            found is None
            or found["what"] not in self.verbs
            or (found["what"] == "slow") != (found["by"] is not None)
            or (found["for"] is not None and found["what"] not in self.lasting)
        ):
            raise FaultError(f"{part!r} is no fault; {self._form}")
        slowness = float(found["by"] or 1.0)
        if slowness <= 0.0:
            raise FaultError(f"{part!r}: a factor is above 0")
        for_s = None if found["for"] is None else float(found["for"])
        return Fault(float(found["at"]), found["what"], found["whom"], slowness, for_s)

    @property
    def _form(self) -> str:
        plain = "|".join(verb for verb in self.verbs if verb != "slow")
        slow = ", or SECONDS slow INSTANCE by FACTOR" if "slow" in self.verbs else ""
        return (
            f"one is SECONDS {plain} INSTANCE{slow}, as 30 kill decode-0, or 40 freeze prefill-0 for 5; "
            f"what may end by itself is {', '.join(self.lasting)}"
        )


def check_names(faults: Sequence[Fault], names: Collection[str]) -> None:
    """Raises `FaultError` if a fault names an instance that does not exist."""
    for fault in faults:
        if fault.whom not in names:
            listed = ", ".join(sorted(names)[:_NUM_LISTED]) + (" and so on" if len(names) > _NUM_LISTED else "")
            raise FaultError(f"{fault}: there is no {fault.whom}; there are {listed}")
