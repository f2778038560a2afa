"""A stand-in for the API server, and how it is reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        yield api


@pytest.fixture
def config(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubeconfig of the stand-in, which the environment names, with a token's file."""
    token = tmp_path / "token"
    token.write_text("first\n")
    path = kubeconfig(tmp_path, api.url, token)
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path
