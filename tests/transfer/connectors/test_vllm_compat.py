"""What differs between the releases of vLLM that the connector knows, and what it says of all others."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from transfer.connectors.vllm.compat import check_version, hash_block_size, release_of
from transfer.errors import TransferError


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1rc2+cpu", "0.31.2.post1"])
def test_a_release_that_was_run_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.30.2", "0.33.0", "1.31.0", "0.310.0", "dev"])
def test_a_release_that_was_never_run_is_refused_by_name(version: str) -> None:
    with pytest.raises(TransferError, match=rf"for vLLM 0\.31 and 0\.32, and this is {version}"):
        check_version(version)


def test_engines_of_two_releases_do_not_count_as_alike() -> None:
    assert release_of("0.32.0+cpu") == release_of("0.32.1") == "0.32"
    assert release_of("0.31.0") == "0.31"


def test_the_tokens_of_a_block_hash_are_asked_of_vllm_where_its_config_does_not_say_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hash_block_size(SimpleNamespace(hash_block_size=16), None) == 16
    module = ModuleType("vllm.v1.core.kv_cache_utils")
    module.resolve_kv_cache_block_sizes = lambda caches, config: (64, config)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert hash_block_size(SimpleNamespace(), 32) == 32  # vLLM 0.31
    assert hash_block_size(SimpleNamespace(hash_block_size=None), 32) == 32
