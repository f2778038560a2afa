"""The keys themselves: how they are read and made, what comes of them, and that nothing shows them."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdproxy.cli import app as pdproxy
from transfer.errors import TransferError
from transfer.trust import KEY_BYTES, AttemptKey, FleetKey, Key, new_key, write_key

TEXT = "0123456789abcdef" * 4
WRONG = ["", "0" * 63, "0" * 65, "g" * 64, "é" * 64, "0" * 128, " ".join(["00"] * 32), "\0" * 64, "-----BEGIN KEY-----"]


@pytest.mark.parametrize("kind", [FleetKey, AttemptKey])
def test_a_key_is_64_digits(kind: type[Key]) -> None:
    key = kind.parse(TEXT)
    assert key.fingerprint == kind.parse(f" {TEXT.upper()}\r\n").fingerprint
    assert key.fingerprint != kind.parse(new_key()).fingerprint
    assert len(key.fingerprint) == 16
    with pytest.raises(TransferError, match="32 bytes, not 31"):
        kind(bytes(KEY_BYTES - 1))


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_key_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text, encoding="utf-8")
    for find in (lambda: FleetKey.find(text, None), lambda: FleetKey.find(None, file)):
        with pytest.raises(TransferError, match="fleet key: 64 hexadecimal digits") as error:
            find()
        assert len(text) < 2 or text not in str(error.value)
        assert error.value.__cause__ is None


def test_where_a_key_is_found(tmp_path: Path) -> None:
    file, other = tmp_path / "key", new_key()
    file.write_text(other)
    assert FleetKey.find(None, None) is None
    expected = FleetKey.parse(other).fingerprint
    found = FleetKey.find(TEXT, file)
    assert found is not None
    assert found.fingerprint == expected, "the file goes before the text"
    with pytest.raises(TransferError, match="cannot be read: No such file"):
        FleetKey.find(TEXT, tmp_path / "none")
    with pytest.raises(TransferError, match="cannot be read: Is a directory"):
        FleetKey.find(None, tmp_path)


def test_a_key_that_others_can_write_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    write_key(file)
    assert FleetKey.find(None, file) is not None
    assert not caplog.text
    file.chmod(0o640)
    assert FleetKey.find(None, file) is not None
    assert f"chmod go-r {file}" in caplog.text
    file.chmod(0o660)
    with pytest.raises(TransferError, match=f"can be written by others than its owner; chmod go-w {file}"):
        FleetKey.find(None, file)


def test_each_purpose_has_bytes_of_its_own() -> None:
    key = FleetKey.parse(TEXT)
    made = [key.curve_secret, key.chunk_secret, bytes.fromhex(TEXT)]
    assert {len(secret) for secret in made} == {KEY_BYTES}
    assert len(set(made)) == 3
    assert not any(secret.hex().startswith(key.fingerprint) for secret in made)


def test_a_capability_is_what_its_docstring_says() -> None:
    key = AttemptKey.parse(TEXT)
    for notify, end in (("tcp://p:1", b"tcp://p:1"), (None, b"")):
        expected = hmac.new(bytes.fromhex(TEXT), b"a1\0" + end, hashlib.sha256).hexdigest()
        assert key.sign("a1", notify) == expected
        assert key.allows("a1", notify, expected)
        assert not key.allows("a2", notify, expected)
        assert not key.allows("a1", "tcp://p:2", expected)
        assert not key.allows("a1", notify, None)


def test_nothing_shows_a_key() -> None:
    for kind in (FleetKey, AttemptKey):
        key = kind.parse(TEXT)
        assert repr(key) == f"<{kind.__name__} {key.fingerprint}>"
        assert TEXT not in repr(key)


def test_written_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "fleet.key"
    assert write_key(file)
    assert file.stat().st_mode & 0o777 == 0o600
    written = file.read_text()
    FleetKey.parse(written)
    assert not write_key(file)
    assert file.read_text() == written
    with pytest.raises(TransferError, match="cannot be written"):
        write_key(file / "below")


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = CliRunner().invoke(pdproxy, ["keys", str(folder)])
    assert (done.exit_code, sorted(path.name for path in folder.iterdir())) == (0, ["attempt.key", "fleet.key"])
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    assert texts[0] != texts[1]
    assert not any(text.strip() in done.output for text in texts)
    again = CliRunner().invoke(pdproxy, ["keys", str(folder)])
    assert again.output.count("was there already") == 2
    assert [path.read_text() for path in sorted(folder.iterdir())] == texts
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(pdproxy, ["keys", str(tmp_path / "file")])
    assert (refused.exit_code, "cannot be written" in refused.output) == (2, True)
