"""The module shows tables to people. Nothing is ever cut off: a figure without its last digits is another figure.

rich alone shortens what has no room, and takes a pipe for a terminal of 80 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

FRAME = 3
"""The characters that a column takes besides its cells: a space on either side, and a line. A table has one line
more."""
LEAST_NAME = 8
"""The fewest characters to which a column of words is narrowed."""


class Table:
    """Table is shown whole. A terminal that is too narrow for it gets its columns in several tables below one another,
    each with the names of the rows in front. What does not go to a terminal is one table, as wide as it has to be.

    The first `names` columns name a row. `words` are the places of the columns that hold words: these stand on the
    left, and are broken into lines where there is no room. All other columns hold figures, which are never broken.
    """

    def __init__(
        self, *headings: str, title: str = "", caption: str = "", names: int = 1, words: Sequence[int] = (0,)
    ) -> None:
        self._headings = headings
        self._title = title
        self._caption = caption
        self._names = names
        self._words = frozenset(words)
        self._rows: list[tuple[tuple[str, ...], str | None]] = []
        self._ends: set[int] = set()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [cells for cells, _ in self._rows]

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Adds a row with a cell for each heading. Raises `ValueError` for another number of cells."""
        if len(cells) != len(self._headings):
            raise ValueError(f"{len(cells)} cells for {len(self._headings)} columns")
        self._rows.append((cells, style))

    def add_section(self) -> None:
        """Draws a line below the last row so far."""
        self._ends.add(len(self._rows) - 1)

    def print_to(self, console: Console) -> None:
        if self._title:
            _say(console, self._title)
        for places, widths in self._parts(console.width if console.is_terminal else None):
            # The table's width is given, and nothing is cropped: the console may believe to be narrower than a pipe is.
            console.print(self._drawn(places, widths), crop=False)
        if self._caption:
            _say(console, self._caption)

    def _parts(self, room: int | None) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the places of the columns of each table to draw, and how wide these are, without their frames. A
        column in which there is nothing is left out."""
        places = [place for place in range(len(self._headings)) if self._width(place, is_whole=True)]
        natural = [self._width(place, is_whole=True) for place in places]
        if room is None or _with_frames(natural) <= room:
            yield places, natural
            return
        widths = [self._width(place, is_whole=False) for place in range(len(self._headings))]
        if _with_frames(_at(places, widths)) <= room:
            yield places, _at(places, widths)
            return
        front = self._front(widths, room)
        part = front
        for place in (one for one in places if one not in front):
            if place in self._words:
                widths[place] = min(widths[place], max(LEAST_NAME, room - FRAME - _with_frames(_at(front, widths))))
            if part != front and _with_frames(_at([*part, place], widths)) > room:
                yield part, _at(part, widths)
                part = front
            part = [*part, place]
        yield part, _at(part, widths)

    def _front(self, widths: list[int], room: int) -> list[int]:
        """Returns the columns that each part begins with, and makes their `widths` narrow enough: those that name a
        row, as many of them as leave room for any figure."""
        for count in range(self._names, 0, -1):
            figures = [width for place, width in enumerate(widths) if place >= count and place not in self._words]
            most = room - FRAME - max(figures, default=LEAST_NAME)
            front = list(range(count))
            if _with_frames(_at(front, widths)) > min(most, room * 3 // 4):
                self._narrow(front, widths, min(most, room // 2))
            if _with_frames(_at(front, widths)) <= most:
                break
        return front

    def _narrow(self, places: Sequence[int], widths: list[int], room: int) -> None:
        """Makes the widest columns of words narrower until these columns take no more than `room`, as far as can be."""
        narrow = [place for place in places if place in self._words]
        while narrow and _with_frames(_at(places, widths)) > room:
            widest = max(narrow, key=widths.__getitem__)
            if widths[widest] <= LEAST_NAME:
                return
            widths[widest] -= 1

    def _width(self, place: int, *, is_whole: bool) -> int:
        """Returns the width of the column's widest cell. Its heading counts as a whole, or may be broken between
        words."""
        heading = [self._headings[place]] if is_whole else self._headings[place].split()
        lines = [line for cells, _ in self._rows for line in cells[place].split("\n")]
        return max(map(cell_len, (*heading, *lines)), default=0)

    def _drawn(self, places: Sequence[int], widths: Sequence[int]) -> RichTable:
        table = RichTable(width=_with_frames(widths), show_header=any(self._headings))
        for place, width in zip(places, widths, strict=True):
            justify: Any = "left" if place in self._words else "right"
            heading = Text(self._headings[place])
            table.add_column(heading, justify=justify, width=width, overflow="fold")
        for number, (cells, style) in enumerate(self._rows):
            # Text, because a string might be read as markup, and a name in brackets would be gone.
            shown = (Text(cells[place]) for place in places)
            table.add_row(*shown, style=style, end_section=number in self._ends)
        return table


def _with_frames(widths: Sequence[int]) -> int:
    return sum(widths) + FRAME * len(widths) + 1


def _at(places: Sequence[int], widths: Sequence[int]) -> list[int]:
    return [widths[place] for place in places]


def _say(console: Console, text: str) -> None:
    """Prints a title or a caption; only a terminal has it broken into lines."""
    console.print(Text(text, style="italic"), soft_wrap=not console.is_terminal)
