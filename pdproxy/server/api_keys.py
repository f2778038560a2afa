"""API keys decide which requests the proxy serves. They come from options and from a file that may change while it
runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pdproxy.errors import ConfigError, Unauthorized
from transfer.errors import TransferError
from transfer.trust import read_secrets

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file: a key that was added or taken away counts after no more than that."""


_NAMED = re.compile(r"(\S+)\s+name=(.*)")
_NAME = re.compile(r"[A-Za-z0-9._@:/+-]{1,64}")


class _Key(NamedTuple):
    """A key that counts: its digest, and the name by which the log tells of it, if it has one."""

    digest: bytes
    name: str | None = None


class ApiKeys:
    """ApiKeys holds the keys of which a request must show one, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    Without any key and without a file, everybody may ask. With a file that has become empty, and no key from elsewhere,
    nobody may. A file that cannot be read any more, or that others can write to, is told of in the log, and the keys it
    last had go on counting. Raises `ConfigError` where the file is such, or has no keys, at the start.
    """

    def __init__(
        self, keys: Iterable[str], file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed = [_Key(_digest(key.encode())) for key in keys]
        self._file = file
        self._clock = clock
        # State: the file's keys, which version of it they are from, and when it is looked at next.
        self._from_file: list[_Key] = []
        self._version: tuple[int, ...] | None = None
        self._look_at = clock() + LOOK_EVERY_S
        if file is not None:
            self._read_first(file)

    @property
    def is_open(self) -> bool:
        """Tells whether no key is asked for."""
        return not self._fixed and self._file is None

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
        found = [known for key in shown for known in self._matching(key)]
        if not found:
            raise Unauthorized("this API key is not one of the proxy's")
        return found[0].name

    def _matching(self, key: str) -> list[_Key]:
        """Returns the keys that `key` is. Every key is compared, and in constant time, so that the time tells
        nothing."""
        shown = _digest(key.encode("latin-1"))  # as headers are decoded
        return [known for known in (*self._fixed, *self._from_file) if hmac.compare_digest(shown, known.digest)]

    def _look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        now = self._clock()
        if self._file is None or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            version = _version(self._file)
            if version != self._version:
                self._from_file = _read(self._file)
                log.info("api_keys_file: %s was read again: %d keys", self._file, len(self._from_file))
        except (OSError, UnicodeDecodeError, TransferError) as error:
            version = ()
            if version != self._version:
                log.warning("api_keys_file: %s cannot be used, its last keys go on counting: %s", self._file, error)
        self._version = version

    def _read_first(self, file: Path) -> None:
        try:
            self._version = _version(file)
            self._from_file = _read(file)
        except OSError as error:
            raise ConfigError(f"api_keys_file: {file} cannot be read: {error.strerror}") from None
        except TransferError as error:
            raise ConfigError(f"api_keys_file: {error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"api_keys_file: {file} is not UTF-8 text") from None
        if not self._from_file:
            raise ConfigError(f"api_keys_file: {file} has no keys; write one per line")

    def __repr__(self) -> str:
        return "<ApiKeys open>" if self.is_open else f"<ApiKeys {len(self._fixed) + len(self._from_file)} keys>"


def _version(file: Path) -> tuple[int, ...]:
    """Returns numbers that change whenever the file is written or replaced. Raises `OSError`."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(file: Path) -> list[_Key]:
    """Returns the file's keys. It has one key per line; empty lines and those that begin with ``#`` have none. A line
    ``KEY name=NAME`` gives the key a name. Raises `TransferError` for a name that does not fit into a log line."""
    lines = ((number, line.strip()) for number, line in enumerate(read_secrets(file).splitlines(), 1))
    return [_key(line, f"{file}, line {number}") for number, line in lines if line and not line.startswith("#")]


def _key(line: str, where: str) -> _Key:
    named = _NAMED.fullmatch(line)
    if named is None:
        return _Key(_digest(line.encode()))
    if _NAME.fullmatch(named[2]) is None:
        raise TransferError(f"{where}: a key's name has 1 to 64 letters, digits and characters of ._@:/+-")
    return _Key(_digest(named[1].encode()), named[2])


def _digest(key: bytes) -> bytes:
    """Returns the digest of `key`, which has one length for all keys."""
    return hashlib.sha256(key).digest()
