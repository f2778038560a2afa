"""Who waits for pages of a model's pool, in order: the more urgent first, among equals the one with the greater age.

A request keeps its age when it is tried again, so it may enter anywhere; two sorted lists are all that takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from math import inf
from typing import Any

Size = Callable[[Any], int | None]


class Demand:
    """What one attempt asks for, of any places that serve `model`.

    `size` tells the pages that it takes at a place of a given shape: 0 for none, None where it cannot be served.
    `age` is when its request came and `deadline` how long it waits, both on the kernel's clock. `avoid` names places
    that have failed the request: they count only where nobody else is open. Until `tied_until` it takes nobody but the
    place that the chooser ties it to. With a `pair` (owner, peer) it can be served by those two only, open or not.
    `is_again`: it was let in before, and no full queue keeps it out. `hints` are for the chooser.

    Mutable state: how often it was passed, and the accounts that are saved up for it; whether it waits.
    """

    __slots__ = (
        "_sizes",
        "age",
        "attempt",
        "avoid",
        "deadline",
        "hints",
        "is_again",
        "is_waiting",
        "model",
        "overtakes",
        "pair",
        "passes",
        "priority",
        "saves",
        "serial",
        "size",
        "tied_until",
    )

    def __init__(
        self,
        attempt: str,
        model: str | None,
        size: Size,
        *,
        age: float,
        deadline: float = inf,
        priority: int = 0,
        avoid: frozenset[str] = frozenset(),
        tied_until: float = -inf,
        pair: tuple[Any, Any] | None = None,
        is_again: bool = False,
        hints: Any = None,
    ) -> None:
        self.attempt = attempt
        self.model = model
        self.size = size
        self.age = age
        self.deadline = deadline
        self.priority = priority
        self.avoid = avoid
        self.tied_until = tied_until
        self.pair = pair
        self.is_again = is_again
        self.hints = hints
        self._sizes: dict[Hashable, int | None] = {}
        self.overtakes = 0
        """How often it was passed while it was its turn."""
        self.passes = 0
        """How often it was passed while it had the greatest age, and it was not its turn."""
        self.saves: tuple[Any, ...] = ()
        self.is_waiting = False
        self.serial = 0

    def pages_at(self, shape: Hashable) -> int | None:
        """`size`, asked once per shape."""
        sizes = self._sizes
        if shape not in sizes:
            sizes[shape] = self.size(shape)
        return sizes[shape]

    def kind(self, shapes: tuple[Hashable, ...]) -> tuple[int | None, ...]:
        """`pages_at` each of `shapes`."""
        return tuple(map(self.pages_at, shapes))

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts those who wait."""
        return -self.priority, self.age, self.serial

    @property
    def is_plain(self) -> bool:
        """Any place of its model will do."""
        return not self.avoid and self.pair is None and self.tied_until == -inf

    def __repr__(self) -> str:
        return f"<Demand {self.attempt} of {self.model}: priority {self.priority}, age {self.age:g}>"


class Line:
    """Those who wait for one model.

    Mutable state: everybody, in order and by age; how many plain ones there are of each size, by shape, and how many
    others; the pages of all, and how many there are of each combination of sizes, for the shapes last asked about.
    """

    __slots__ = ("_by_age", "_fewest", "_fewest_of", "_in_order", "_kinds", "_kinds_of", "_sizes", "num_special")

    def __init__(self) -> None:
        self._in_order: list[tuple[int, float, int, Demand]] = []
        self._by_age: list[tuple[float, int, Demand]] = []
        self._sizes: dict[Hashable, dict[int, int]] = {}
        self.num_special = 0
        self._fewest_of: frozenset[Hashable] = frozenset()
        self._fewest = 0
        self._kinds_of: tuple[Hashable, ...] | None = None
        self._kinds: dict[tuple[int | None, ...], int] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Demand]:
        """In order."""
        return (entry[-1] for entry in self._in_order)

    def by_age(self) -> Iterator[Demand]:
        return (entry[-1] for entry in self._by_age)

    @property
    def head(self) -> Demand:
        return self._in_order[0][-1]

    def add(self, demand: Demand) -> None:
        insort(self._in_order, (*demand.order, demand))
        insort(self._by_age, (demand.age, demand.serial, demand))
        self._count_in(demand, 1)

    def remove(self, demand: Demand) -> None:
        del self._in_order[bisect_left(self._in_order, (*demand.order, demand))]
        del self._by_age[bisect_left(self._by_age, (demand.age, demand.serial, demand))]
        self._count_in(demand, -1)

    def _count_in(self, demand: Demand, num: int) -> None:
        self._fewest += num * self._fewest_pages(demand)
        if self._kinds_of is not None:
            self._count_kind(demand.kind(self._kinds_of), num)
        if not demand.is_plain:
            self.num_special += num
            return
        for shape in self._sizes:
            self._count(shape, demand, num)

    def fewest(self, shapes: frozenset[Hashable]) -> int:
        """The pages of all of them, each counted at that of these shapes where it takes the fewest."""
        if shapes != self._fewest_of:
            self._fewest_of = shapes
            self._fewest = sum(self._fewest_pages(demand) for demand in self)
        return self._fewest

    def _fewest_pages(self, demand: Demand) -> int:
        return min((demand.pages_at(shape) or 0 for shape in self._fewest_of), default=0)

    def kinds(self, shapes: tuple[Hashable, ...]) -> Iterable[tuple[int | None, ...]]:
        """The different combinations of the pages that one of them takes at places of these shapes."""
        if shapes != self._kinds_of:
            self._kinds_of, self._kinds = shapes, {}
            for demand in self:
                self._count_kind(demand.kind(shapes), 1)
        return self._kinds

    def _count_kind(self, kind: tuple[int | None, ...], num: int) -> None:
        self._kinds[kind] = self._kinds.get(kind, 0) + num
        if not self._kinds[kind]:
            del self._kinds[kind]

    def least(self, shape: Hashable) -> int | None:
        """The fewest pages that a plain one of them takes at places of this shape; None where there is none."""
        if shape not in self._sizes:
            self._sizes[shape] = {}
            for demand in self:
                if demand.is_plain:
                    self._count(shape, demand, 1)
        return min(self._sizes[shape], default=None)

    def _count(self, shape: Hashable, demand: Demand, num: int) -> None:
        pages, counts = demand.pages_at(shape), self._sizes[shape]
        if pages is None:
            return
        counts[pages] = counts.get(pages, 0) + num
        if not counts[pages]:
            del counts[pages]
