"""The parts of vLLM's connector interface that differ from release to release. All else in this folder is the same for
each."""

from __future__ import annotations

import re
from typing import Any

from transfer.errors import TransferError

KNOWN = ((0, 31), (0, 32))
"""The releases of vLLM that this connector has been run with."""


def check_version(version: str) -> None:
    """Raises `TransferError` for a release of vLLM that this connector is not known to work with."""
    known = [f"{major}.{minor}" for major, minor in KNOWN]
    if release_of(version) not in known:
        raise TransferError(
            f"this connector is for vLLM {' and '.join(known)}, and this is {version}: its connector interface changes "
            "by release"
        )


def release_of(version: str) -> str:
    """Returns the release that a version is of, as in ``0.32``, or the whole text where it names none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return version if found is None else f"{int(found[1])}.{int(found[2])}"


def hash_block_size(kv_cache_config: Any, vllm_config: Any) -> int:
    """Returns the tokens that each of a request's block hashes covers. vLLM 0.31 works it out after it has made the
    connector, and so does not say it."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        _, told = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(told)


def transfer_results(sent: set[str], loaded: set[str], failed: set[str]) -> Any:
    """Returns what `get_transfer_results` returns."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded, failed_recving=failed)
