"""API keys decide which requests the proxy serves. They come from options and from a file that may change while it
runs."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdproxy.admission.key_limits import KeyOwner, Rates
from pdproxy.errors import ConfigError, Unauthorized
from pdproxy.orchestrator.context import Headers
from transfer.errors import TransferError
from transfer.trust import read_secrets

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file: a key that was added or taken away counts after no more than that."""


_NAMED = re.compile(r"(\S+)\s+name=(.*)")
_MORE = re.compile(r"[\s,#]")
"""The characters of lines that are meant as more than a key: several keys, a comment, or a name without name=."""
_NAME = re.compile(r"[A-Za-z0-9._@:/+-]{1,64}")
_RATE = re.compile(r"[1-9][0-9]{0,14}")


class _Key(NamedTuple):
    """A _Key is what is known of a key that counts: the name by which the log tells of it, if it has one, with the
    limits that its line gives to that name."""

    name: str | None = None
    rates: Rates = Rates()


class ApiKeys:
    """ApiKeys holds the keys of which a request must show one, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    Without any key and without a file, everybody may ask. With a file that has become empty, and no key from elsewhere,
    nobody may. A file that cannot be read any more, or that others can write to, is told of in the log, and the keys it
    last had go on counting. Raises `ConfigError` where the file is such, or has no keys, at the start. Both name the
    file's `option`.

    This process enforces one of `num_parts` equal parts of the limits that the file gives to names. With `names_all`
    each request has an owner, though nobody may have to show a key.
    """

    def __init__(
        self,
        keys: Iterable[str],
        file: Path | None = None,
        *,
        num_parts: int = 1,
        names_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
        option: str = "api_keys_file",
    ) -> None:
        self._option = option
        self._fixed = {digest: _Key() for digest in map(_digest, (key.encode() for key in keys))}
        self._file = file
        self._clock = clock
        self._num_parts = num_parts
        self._nobody = KeyOwner(None, clock=clock) if names_all else None
        # State: the file's keys by their digests, which version of it they are from, and when it is looked at next; who
        # has the keys of each name, with what is left of its limits. A name that has gone from the file keeps its
        # owner, for requests under way.
        self._from_file: dict[bytes, _Key] = {}
        self._owners: dict[str, KeyOwner] = {}
        self._version: tuple[int, ...] | None = None
        self._look_at = clock() + LOOK_EVERY_S
        if file is not None:
            self._read_first(file)

    @property
    def is_open(self) -> bool:
        """Tells whether no key is asked for."""
        return not self._fixed and self._file is None

    @property
    def may_have_names(self) -> bool:
        """Tells whether keys may have names, now or once the file has changed."""
        return self._file is not None

    def owner(self, headers: Mapping[str, str]) -> KeyOwner | None:
        """Returns who has the key that the headers (names in lower case) show; None where that has no name and nobody
        asks. Raises `Unauthorized` where they show none of the keys."""
        name = self.check(headers)
        return self._nobody if name is None else self._owners[name]

    def limit_headers(self, name: str | None) -> Headers:
        """Returns the headers that tell of the limits of a name."""
        owner = None if name is None else self._owners.get(name)
        return [] if owner is None else owner.headers()

    def check(self, headers: Mapping[str, str]) -> str | None:
        """Returns the name of the key that the headers (names in lower case) show, if it has one. Raises `Unauthorized`
        where they show none of the keys."""
        if self.is_open:
            return None
        self._look()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = [token.strip()] if scheme.lower() == "bearer" else []
        shown += [headers["x-api-key"].strip()] if "x-api-key" in headers else []
        if not shown:
            raise Unauthorized("this proxy asks for an API key: send Authorization: Bearer KEY, or x-api-key: KEY")
        for key in shown:
            known = self._find(key)
            if known is not None:
                return known.name
        raise Unauthorized("this API key is not one of the proxy's")

    def _find(self, key: str) -> _Key | None:
        """Returns what is known of `key`; None where it is no key. It is looked up by its digest, of which nobody can
        choose a part: the time that this takes tells nothing of the keys there are."""
        shown = _digest(key.encode("latin-1"))  # as headers are decoded
        return self._fixed.get(shown) or self._from_file.get(shown)

    def _look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        now = self._clock()
        if self._file is None or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            version = _version(self._file)
            if version != self._version:
                self._take_in(_read(self._file, self._option))
                log.info("%s: %s was read again: %d keys", self._option, self._file, len(self._from_file))
        except (OSError, UnicodeDecodeError, TransferError) as error:
            version = ()
            if version != self._version:
                text = "%s: %s cannot be used, its last keys go on counting: %s"
                log.warning(text, self._option, self._file, error)
        self._version = version

    def _take_in(self, keys: Sequence[tuple[bytes, _Key]]) -> None:
        """Takes the file's keys, and the limits of their names. Raises `TransferError`, and changes nothing, where the
        lines of one name differ."""
        rates: dict[str, Rates] = {}
        for _, key in keys:
            if key.name is not None:
                rates[key.name] = _joined(key.name, rates.get(key.name, Rates()), key.rates)
        self._from_file = dict(reversed(keys))  # of several lines with the same key, the first counts
        for name, limits in rates.items():
            if name in self._owners:
                self._owners[name].limit(limits)
            else:
                self._owners[name] = KeyOwner(name, limits, num_parts=self._num_parts, clock=self._clock)

    def _read_first(self, file: Path) -> None:
        try:
            self._version = _version(file)
            self._take_in(_read(file, self._option))
        except OSError as error:
            raise ConfigError(f"{self._option}: {file} cannot be read: {error.strerror}") from None
        except TransferError as error:
            raise ConfigError(f"{self._option}: {error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{self._option}: {file} is not UTF-8 text") from None
        if not self._from_file:
            raise ConfigError(f"{self._option}: {file} has no keys; write one per line")

    def __repr__(self) -> str:
        return "<ApiKeys open>" if self.is_open else f"<ApiKeys {len(self._fixed) + len(self._from_file)} keys>"


def _version(file: Path) -> tuple[int, ...]:
    """Returns numbers that change whenever the file is written or replaced. Raises `OSError`."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(file: Path, option: str) -> list[tuple[bytes, _Key]]:
    """Returns the file's keys, each behind its digest. It has one key per line; empty lines and those that begin with
    ``#`` have none. A line ``KEY name=NAME`` gives the key a name, and ``rpm=N`` and ``tpm=N`` behind it limit the
    requests and tokens per minute of that name. Every other line is a key as a whole, and one that looks like more is
    told of in the log. Raises `TransferError` for a name that does not fit into a log line, and for no limit."""
    keys = []
    for number, line in enumerate(map(str.strip, read_secrets(file).splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        keys.append(_key(line, f"{file}, line {number}"))
        if _MORE.search(line) is not None and _NAMED.fullmatch(line) is None:
            log.warning(
                "%s: %s, line %d: a blank, a comma or # is in it, and the whole line counts as one key; write one key "
                "per line, as KEY or KEY name=NAME [rpm=N] [tpm=N], and comments on lines of their own",
                option,
                file,
                number,
            )
    return keys


def _key(line: str, where: str) -> tuple[bytes, _Key]:
    named = _NAMED.fullmatch(line)
    if named is None:
        return _digest(line.encode()), _Key()
    name, *limits = named[2].split() or [""]
    if _NAME.fullmatch(name) is None or not all("=" in word for word in limits):
        raise TransferError(f"{where}: a key's name has 1 to 64 letters, digits and characters of ._@:/+-")
    return _digest(named[1].encode()), _Key(name, _rates(limits, where))


def _rates(words: Sequence[str], where: str) -> Rates:
    """Returns the limits that the words behind a name give. Raises `TransferError`."""
    given: dict[str, int] = {}
    for word in words:
        kind, _, number = word.partition("=")
        if kind not in ("rpm", "tpm") or _RATE.fullmatch(number) is None or kind in given:
            raise TransferError(f"{where}: behind a key's name come rpm=N and tpm=N, each once, with N above 0")
        given[kind] = int(number)
    return Rates(given.get("rpm"), given.get("tpm"))


def _joined(name: str, one: Rates, other: Rates) -> Rates:
    """Returns the limits that two lines give to one name. Raises `TransferError` where they differ."""
    for ours, theirs in zip(one, other, strict=True):
        if ours is not None and theirs is not None and ours != theirs:
            raise TransferError(f"the lines with name={name} give unlike limits; give them in one of the lines")
    requests = other.requests_per_min if one.requests_per_min is None else one.requests_per_min
    tokens = other.tokens_per_min if one.tokens_per_min is None else one.tokens_per_min
    return Rates(requests, tokens)


def _digest(key: bytes) -> bytes:
    """Returns the digest of `key`, which has one length for all keys."""
    return hashlib.sha256(key).digest()
