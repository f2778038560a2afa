"""The secrets of a fleet. They decide who may speak to a receiver, whose chunks are shared, and which attempts a proxy
vouches for.

There are two keys, because two groups hold them. Prefillers and decoders have the *fleet key*: it opens the control
sockets and names the chunks. The proxy and the decoders have the *attempt key*: a prefiller that was broken into cannot
make attempts with it. Every key is 32 random bytes, in a file or a variable as 64 hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import ClassVar, Self

from transfer.errors import TransferError

log = logging.getLogger(__name__)

KEY_BYTES = 32
FLEET_KEY_FILE, ATTEMPT_KEY_FILE = "fleet.key", "attempt.key"
"""The file names that ``pdproxy keys`` gives."""


def read_secrets(file: Path) -> str:
    """Returns the text of a file with keys. Raises `OSError` and `UnicodeDecodeError`, and `TransferError` where others
    than its owner can write to it: then they could let themselves in. That others can read it is a warning."""
    with file.open(encoding="utf-8-sig") as opened:  # some editors put a byte order mark before the first key
        mode = os.fstat(opened.fileno()).st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise TransferError(f"{file} can be written by others than its owner; chmod go-w {file}")
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s has keys, and can be read by others than its owner; chmod go-r %s", file, file)
        return opened.read()


class Key:
    """A `Key` is 32 secret bytes. Neither its `repr` nor any error shows them. Raises `TransferError` for another
    length."""

    name: ClassVar[str] = "key"

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise TransferError(f"the {self.name} key must have {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fingerprint}>"

    @classmethod
    def find(cls, text: str | None, file: Path | None) -> Self | None:
        """Returns the key in `file`, else the one in `text`, else None. Raises `TransferError` for a text that is no
        key, and for a file that cannot be read."""
        if file is None:
            return None if text is None else cls.parse(text)
        try:
            text = read_secrets(file)
        except OSError as error:
            raise TransferError(f"{file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            text = ""
        try:
            return cls.parse(text)
        except TransferError:
            raise TransferError(f"{file} holds no {cls.name} key: {_MEANT}") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the key of 64 hexadecimal digits; white space around them is ignored. Raises `TransferError`
        otherwise."""
        digits = text.strip()
        try:
            if len(digits) == 2 * KEY_BYTES:
                return cls(bytes.fromhex(digits))
        except ValueError:
            pass
        raise TransferError(f"this is no {cls.name} key: {_MEANT}")

    @property
    def fingerprint(self) -> str:
        """The 16 hexadecimal digits by which equal keys can be told from unequal ones. It is no secret."""
        return self._derived(b"fingerprint")[:8].hex()

    @property
    def digits(self) -> str:
        """The key itself as text, which `parse` takes. It is meant for another process of the same owner, and for no
        log."""
        return self._secret.hex()

    def _derived(self, purpose: bytes) -> bytes:
        """Returns 32 bytes for one purpose. The bytes for another purpose cannot be worked out from them."""
        return hashlib.blake2b(key=self._secret, person=purpose, digest_size=KEY_BYTES).digest()


class FleetKey(Key):
    """A secret that prefillers and decoders of one fleet share, and nobody else has.

    Only those who have this key can speak to a receiver, or know the name of any chunk.
    """

    name = "fleet"

    @property
    def curve_secret(self) -> bytes:
        """The secret half of the fleet's Curve25519 key pair, 32 bytes."""
        return self._derived(b"control socket")

    @property
    def chunk_secret(self) -> bytes:
        """The `secret` for `transfer.plan.keys.chunk_keys`, 32 bytes."""
        return self._derived(b"chunk keys")


NOT_SIGNED = "this decoder has an attempt key and the attempt was not signed with it; the proxy needs the same one"
"""A decoder's answer to an attempt that the owners of its key have not signed."""


class AttemptKey(Key):
    """A secret that a proxy and its decoders share: the proxy signs attempts with it, decoders take no others.

    A capability is for one attempt and for one place where its signals go, so nobody on the way can change either.
    """

    name = "attempt"

    def sign(self, attempt: str, notify: str | None) -> str:
        """Returns the capability of this attempt: 64 hexadecimal digits of an HMAC-SHA256.

        Its message is `attempt`, a zero byte and `notify` (empty for None), in UTF-8.
        """
        message = f"{attempt}\0{notify or ''}".encode()
        return hmac.digest(self._secret, message, "sha256").hex()

    def allows(self, attempt: str, notify: str | None, capability: str | None) -> bool:
        """Tells whether `capability` is that of this attempt. The time that this takes tells nothing about the right
        one."""
        return hmac.compare_digest(self.sign(attempt, notify).encode(), (capability or "").encode())


def new_key() -> str:
    """Returns a fresh key as text: 64 hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def write_key(file: Path) -> bool:
    """Writes a fresh key to `file`, which only its owner can read. Makes its folder where there is none.

    Returns False where the file is there already: it stays as it is. Raises `TransferError` where it cannot be written.
    """
    try:
        if file.is_file():
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
            opened.write(f"{new_key()}\n")
    except OSError as error:
        raise TransferError(f"{file} cannot be written: {error.strerror}") from None
    return True


_MEANT = f"{2 * KEY_BYTES} hexadecimal digits are meant, as `pdproxy keys` writes them"
