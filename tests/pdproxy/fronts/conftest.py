"""Keys for links over TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA and a certificate of it, and those of somebody else."""
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for who in ("fleet", "other"):
        ca, one = folder / f"{who}-ca", folder / who
        _openssl(
            "req", "-x509", *key, "-subj", f"/CN={who}-ca", "-days", "2", "-keyout", f"{ca}.key", "-out", f"{ca}.pem"
        )
        _openssl("req", *key, "-subj", f"/CN={who}", "-keyout", f"{one}.key", "-out", f"{one}.csr")
        sign = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2")
        _openssl("x509", "-req", "-in", f"{one}.csr", *sign, "-out", f"{one}.pem")
    return folder
