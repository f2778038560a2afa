"""The transfer inside vLLM, as an out-of-tree connector. Nothing is changed in vLLM.

    --kv-transfer-config '{"kv_connector": "PdproxyConnector", "kv_connector_module_path": "transfer.connectors.vllm",
                           "kv_role": "kv_consumer", "kv_connector_extra_config": {"pd_buffer_size": "2GiB"}}'

A prefiller's KV goes out of vLLM's own blocks, layer by layer while vLLM computes, into the PD buffer of a decoder that
has room for all of it. The decoder's vLLM copies it into its own blocks when it schedules the request.

    vLLM's scheduler ── StepOrders, with every step ──► vLLM's worker ──► DataPlane (a prefiller's), or
           SchedulerSide ◄────── StepReport ─────────── WorkerSide        ReceiverThread (a decoder's)
           BlockAnswers  ◄────── what vLLM has cached ──────────────────────── its BlockCache

Each rank of a decoder has its part of the PD buffer. Rank 0 alone has the receiver, which grants the same pages on all
of them; the others have a `RankThread`, which asks rank 0 what lies there.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PdproxyConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'transfer.connectors.vllm' has no attribute {name!r}")
    from transfer.connectors.vllm import connector

    return getattr(connector, name)
