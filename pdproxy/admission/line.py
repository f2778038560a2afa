"""The module keeps who waits for pages of a model's pool, in order: more urgent requests first, then older requests.

A request keeps its age when it is tried again, so it may enter the line anywhere. Two sorted lists are enough for that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import inf
from typing import Any

from pdproxy.admission.room import NO_ROOM, Room

Size = Callable[[Any], int | None]


class Demand:
    """A `Demand` is what one attempt asks for. Any places that serve `model` may meet it.

    `size` tells how many pages the attempt takes at a place of a given shape: 0 for none, None where the place cannot
    serve it. `age` is the time at which its request came, and `deadline` is the time until which it waits. Both are in
    seconds on the kernel's clock. `avoid` names places that have failed the request. They count only where no other
    place is open. Until `tied_until`, the demand takes only the place that the chooser ties it to. With a `pair`
    (owner, peer), only those two places can serve it, open or not. With `text_terms`, only places of a revision with
    these very terms can: they go on with an answer that another such place has begun. `is_again` says that it was let
    in before, so that no full queue keeps it out. `hints` are for the chooser. `num_tokens` is the length of what is to
    be prefilled, for whoever counts that where the grant is made. `room` is what it takes in the KV cache where its
    answer is written.

    Mutable state: how often others passed it; the places that are saved up for it; whether it waits; what it lacked
    when it began to.
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
        "lacks",
        "model",
        "num_tokens",
        "overtakes",
        "pair",
        "passes",
        "priority",
        "room",
        "saves",
        "serial",
        "size",
        "text_terms",
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
        text_terms: tuple[tuple[str, str], ...] | None = None,
        is_again: bool = False,
        hints: Any = None,
        num_tokens: int = 0,
        room: Room = NO_ROOM,
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
        self.text_terms = text_terms
        self.is_again = is_again
        self.hints = hints
        self.num_tokens = num_tokens
        self.room = room
        self._sizes: dict[Hashable, int | None] = {}
        self.overtakes = 0
        """Counts how often another demand passed this one while it was this one's turn."""
        self.passes = 0
        """Counts how often another demand passed this one while this one was the oldest, but it was not its turn."""
        self.saves: tuple[Any, ...] = ()
        self.is_waiting = False
        self.lacks = ""
        """The thing of which there was none as it got in line: ``slots`` (pages), ``kv_cache`` (room where its answer
        is written), ``turn`` (both were there, and it was another's turn), or ``instance`` (none was open)."""
        self.serial = 0

    def pages_at(self, shape: Hashable) -> int | None:
        """Returns the number of pages at places of `shape`, or None where they cannot serve the demand. Asks `size`
        once per shape.
        """
        sizes = self._sizes
        if shape not in sizes:
            sizes[shape] = self.size(shape)
        return sizes[shape]

    def forget_sizes(self) -> None:
        """Has `size` asked again for every shape. The demand must not be in line meanwhile."""
        self._sizes.clear()

    def kind(self, shapes: tuple[Hashable, ...]) -> tuple[int | None, ...]:
        """Returns `pages_at` for each of `shapes`, in their order."""
        return tuple(map(self.pages_at, shapes))

    @property
    def order(self) -> tuple[int, float, int]:
        """Returns the key that sorts the line: the demand that goes first has the smallest key."""
        return -self.priority, self.age, self.serial

    @property
    def is_plain(self) -> bool:
        """Tells whether any place of the demand's model will do."""
        return not self.avoid and self.pair is None and self.text_terms is None and self.tied_until == -inf

    def __repr__(self) -> str:
        return f"<Demand {self.attempt} of {self.model}: priority {self.priority}, age {self.age:g}>"


class Line:
    """A `Line` holds the demands that wait for one model.

    Mutable state: all demands, in order, by age and by the tokens of their rooms; the number of plain demands of each
    size, by shape; the number of other demands, and of those that name a pair; the pages of all demands, and the number
    of demands of each combination of sizes, both for the shapes that were asked about last.
    """

    __slots__ = (
        "_by_age",
        "_fewest",
        "_fewest_of",
        "_in_order",
        "_kinds",
        "_kinds_of",
        "_rooms",
        "_sizes",
        "num_pairs",
        "num_special",
    )

    def __init__(self) -> None:
        self._in_order: list[tuple[int, float, int, Demand]] = []
        self._by_age: list[tuple[float, int, Demand]] = []
        self._rooms: list[tuple[int, int, Demand]] = []
        self._sizes: dict[Hashable, dict[int, int]] = {}
        self.num_special = 0
        self.num_pairs = 0
        self._fewest_of: frozenset[Hashable] = frozenset()
        self._fewest = 0
        self._kinds_of: tuple[Hashable, ...] | None = None
        self._kinds: dict[tuple[int | None, ...], int] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Demand]:
        """Iterates over the demands in the order of their turns. Compiled, a generator expression would list them all
        first; so would one in `by_age`."""
        for entry in self._in_order:
            yield entry[-1]

    def by_age(self) -> Iterator[Demand]:
        for entry in self._by_age:
            yield entry[-1]

    @property
    def head(self) -> Demand:
        return self._in_order[0][-1]

    @property
    def smallest(self) -> Demand:
        """Returns the demand that takes the fewest tokens where its answer is written."""
        return self._rooms[0][-1]

    def add(self, demand: Demand) -> None:
        insort(self._in_order, (*demand.order, demand))
        insort(self._by_age, (demand.age, demand.serial, demand))
        insort(self._rooms, (demand.room.tokens, demand.serial, demand))
        self._count_in(demand, 1)

    def remove(self, demand: Demand) -> None:
        del self._in_order[bisect_left(self._in_order, (*demand.order, demand))]
        del self._by_age[bisect_left(self._by_age, (demand.age, demand.serial, demand))]
        del self._rooms[bisect_left(self._rooms, (demand.room.tokens, demand.serial, demand))]
        self._count_in(demand, -1)

    def _count_in(self, demand: Demand, num: int) -> None:
        self._fewest += num * self._fewest_pages(demand)
        if self._kinds_of is not None:
            self._count_kind(demand.kind(self._kinds_of), num)
        if not demand.is_plain:
            self.num_special += num
            self.num_pairs += num * (demand.pair is not None)
            return
        for shape in self._sizes:
            self._count(shape, demand, num)

    def fewest(self, shapes: frozenset[Hashable]) -> int:
        """Returns the pages of all demands together. Each demand counts at the shape, out of `shapes`, where it takes
        the fewest.
        """
        if shapes != self._fewest_of:
            self._fewest_of = shapes
            self._fewest = sum(self._fewest_pages(demand) for demand in self)
        return self._fewest

    def _fewest_pages(self, demand: Demand) -> int:
        return min((demand.pages_at(shape) or 0 for shape in self._fewest_of), default=0)

    def kinds(self, shapes: tuple[Hashable, ...]) -> Iterable[tuple[int | None, ...]]:
        """Returns the different combinations of page numbers which one demand takes at places of these shapes."""
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
        """Returns the fewest pages that a plain demand takes at places of this shape; None where there is no such
        demand.
        """
        if shape not in self._sizes:
            self._sizes[shape] = {}
            for demand in self:
                if demand.is_plain:
                    self._count(shape, demand, 1)
        return min(self._sizes[shape], default=None)

    def might_fit(self, rooms: Mapping[Hashable, float]) -> bool:
        """Tells whether a plain demand takes no more pages than `rooms` has for its shape."""
        return any((pages := self.least(shape)) is not None and pages <= room for shape, room in rooms.items())

    def _count(self, shape: Hashable, demand: Demand, num: int) -> None:
        pages, counts = demand.pages_at(shape), self._sizes[shape]
        if pages is None:
            return
        counts[pages] = counts.get(pages, 0) + num
        if not counts[pages]:
            del counts[pages]
