"""ClientHeaders decodes a request's headers only when they are asked for: nobody looks at most of the twenty usual
ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar, overload

T = TypeVar("T")


class ClientHeaders(Mapping[str, str]):
    """ClientHeaders is made of pairs of bytes, names in lower case. Where a name comes more than once, the last value
    counts."""

    __slots__ = ("_values",)

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._values = dict(pairs)

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...

    def get(self, name: str, /, default: str | T | None = None) -> str | T | None:
        value = self._values.get(name.encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, name: str) -> str:
        try:
            return self._values[name.encode("latin-1")].decode("latin-1")
        except KeyError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode("latin-1") in self._values

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._values)

    def __len__(self) -> int:
        return len(self._values)
