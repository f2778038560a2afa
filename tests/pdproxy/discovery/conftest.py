"""A stand-in for the API server, and how it is reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.kubernetes_api import NAMESPACE, KubernetesApi


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        yield api


def kubeconfig(folder: Path, url: str, token_file: Path | None = None) -> Path:
    """A kubeconfig for the server at `url`."""
    user = "{}" if token_file is None else f"{{tokenFile: {token_file}}}"
    path = folder / "kubeconfig"
    path.write_text(f"""\
apiVersion: v1
kind: Config
current-context: it
contexts: [{{name: it, context: {{cluster: it, user: it, namespace: {NAMESPACE}}}}}]
clusters: [{{name: it, cluster: {{server: "{url}"}}}}]
users: [{{name: it, user: {user}}}]
""")
    return path


@pytest.fixture
def config(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubeconfig of the stand-in, which the environment names, with a token's file."""
    token = tmp_path / "token"
    token.write_text("first\n")
    path = kubeconfig(tmp_path, api.url, token)
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path
