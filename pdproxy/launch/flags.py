"""The module reads options that users give to an engine, as far as the launcher has to know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdproxy.launch.errors import PreflightError


def flag(words: Sequence[str], *names: str) -> str | None:
    """Returns the value of the last of these options in a command line: ``--name value`` or ``--name=value``; None
    where it has none of them."""
    value = None
    for index, name, attached in _options(words):
        if name in names:
            value = attached if attached is not None else next(iter(words[index + 1 : index + 2]), "")
    return value


def number(words: Sequence[str], *names: str) -> int:
    """Returns the last of these options as a number of things, 1 where none is given. Raises `PreflightError`."""
    text = flag(words, *names)
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise PreflightError(f"{names[0]} {text} is not a number of 1 or more")
    return int(text)


def refuse(words: Sequence[str], owned: Mapping[str, str], option: str) -> None:
    """Raises `PreflightError` for an option that the launch itself decides; `owned` says by name how to choose it."""
    for _, name, _ in _options(words):
        # vLLM takes members of an object as ``--name.member value``.
        whole = name.partition(".")[0]
        if whole in owned:
            raise PreflightError(f"{option}: {name} is for the launcher to give, on both sides alike; {owned[whole]}")


def _options(words: Sequence[str]) -> Iterator[tuple[int, str, str | None]]:
    """Yields index, name and attached value of each option. vLLM takes underscores for hyphens, and no other engine has
    options with underscores."""
    for index, word in enumerate(words):
        if word.startswith("-") and not word.startswith("-", 2):
            name, equals, value = word.partition("=")
            yield index, name.replace("_", "-"), value if equals else None
