"""The module makes pieces of the page: tables, legends, and figures with their numbers below."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pdproxy.loadtest.report.svg import colour


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Returns a table; the first column names its row, and all others hold figures."""
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in headings)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    told = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    return f'<div class="wide"><table>{told}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Returns a legend out of pairs of a style and a name."""
    keys = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for style, name in names)
    return f'<p class="legend">{keys}</p>'


def runs_legend(labels: Iterable[tuple[int, str]]) -> str:
    return legend((colour(index), label) for index, label in labels)


def figure(title: str, note: str, *parts: str) -> str:
    """Returns a figure with its `parts` in order: pictures come first, their numbers below."""
    return f"<section><h3>{escape(title)}</h3><p>{escape(note)}</p>{''.join(parts)}</section>"


def pictures(*drawn: str, is_wide: bool = False) -> str:
    """Returns the pictures side by side where there is room, and wide ones below each other."""
    return f'<div class="{"stack" if is_wide else "row"}">{"".join(f"<div>{one}</div>" for one in drawn)}</div>'


def folded(summary: str, *parts: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def with_contents(parts: Iterable[str]) -> Iterator[str]:
    """Yields links to the headings of all parts, and then the parts with an anchor at each of these headings. A chapter
    that can be folded has one link, because the headings in it cannot be seen while it is folded."""
    links: list[str] = []
    anchored = [_anchored(part, links) for part in parts]
    yield f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>'
    yield from anchored


_HEADING = re.compile(r"<(h[23])>(.*?)</\1>")
_CHAPTER = re.compile(r'(<details class="chapter")(.*?<summary>(.*?)</summary>)', re.DOTALL)


def _anchored(part: str, links: list[str]) -> str:
    def anchor(words: str) -> str:
        name = f"part-{len(links) + 1}"
        links.append(f'<li><a href="#{name}">{words}</a></li>')
        return f'id="{name}"'

    if _CHAPTER.match(part):
        return _CHAPTER.sub(lambda found: f"{found[1]} {anchor(found[3])}{found[2]}", part, count=1)
    return _HEADING.sub(lambda found: f"<{found[1]} {anchor(found[2])}>{found[2]}</{found[1]}>", part)


def paragraph(words: str, style: str = "") -> str:
    return f'<p class="{style}">{escape(words)}</p>' if style else f"<p>{escape(words)}</p>"
