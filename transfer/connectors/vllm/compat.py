"""The parts of vLLM's connector interface that differ from release to release. All else in this folder is the same for
each."""

from __future__ import annotations

import re
from typing import Any

from transfer.errors import TransferError

KNOWN = ((0, 32),)
"""The releases of vLLM that this connector has been run with."""


def check_version(version: str) -> None:
    """Raises `TransferError` for a release of vLLM that this connector is not known to work with."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) not in KNOWN:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
        raise TransferError(
            f"this connector is for vLLM {known}, and this is {version}: its connector interface changes by release"
        )


def transfer_results(sent: set[str], loaded: set[str], failed: set[str]) -> Any:
    """Returns what `get_transfer_results` returns."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded, failed_recving=failed)
