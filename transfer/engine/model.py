"""The model. It is loaded from a local folder and fed one sequence at a time, with its KV in the paged store.

One sequence per forward pass keeps the arithmetic that of `model.generate`, so that answers can be compared token for
token. Sequences take turns instead of sharing a batch. It is meant to be correct and clear before it is fast.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from transfer.agents.device import resolve
from transfer.engine.cache_need import BlockTable
from transfer.engine.layer_writes import layer_writes
from transfer.engine.paged_cache import OnLayer, PagedStore, observe_layout, sequence_cache
from transfer.engine.ranks.split import AddUp, split_model
from transfer.plan.layout import RankLayout
from transfer.plan.ranks import Rank
from transfer.roles.handshake import Identity

_FINGERPRINT_SAMPLES = 16
_FINGERPRINT_BYTES = 4096
_NOT_IN_FINGERPRINT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")

WHOLE = Rank()
OnLayers = Callable[[int, int, int], None]
"""A function that is told (group, first layer, end layer) when the KV of these layers, of the tokens being fed, is in
their page."""


class ModelRunner:
    """A `ModelRunner` holds a causal LM and the layout of its KV, or what one tensor-parallel rank has of both.

    All ranks make theirs at the same time; `add_up` is the sum over them. Raises `GeometryError` for a model whose KV
    cannot be paged, or that cannot be divided so, and `TransferError` for a device that is not there. `device` is read
    once: ``cuda`` without an index is from then on the GPU that was current. `layers_per_write` as in `layer_writes`.

    Mutable state: `num_tokens_fed`, how many tokens went through the model so far (a decoder that continues a handoff
    is fed one per token of the answer and none of the prompt). Used by one thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        chunk_size: int,
        layers_per_write: int | None = None,
        rank: Rank = WHOLE,
        add_up: AddUp | None = None,
    ) -> None:
        disable_progress_bar()  # it writes over log lines
        self.folder = folder
        self.device = resolve(device)
        torch_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True)
        self._model = model.to(self.device).eval()
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )
        layout = observe_layout(self._model, chunk_size)
        self.layout: RankLayout = layout.of_rank(rank.size, rank.index)
        if rank.size > 1:
            assert add_up is not None
            split_model(self._model, layout, rank, add_up)
        self._writes = [layer_writes(group, layers_per_write) for group in self.layout.groups]
        self.num_tokens_fed = 0

    def __repr__(self) -> str:
        return f"<ModelRunner {type(self._model).__name__} on {self.device}, {self.num_tokens_fed} tokens fed>"

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def context_length(self) -> int | None:
        """The length of the longest sequence that the model was made for, in tokens; None where its config does not
        say."""
        return getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of end-of-sequence, from generation_config.json, else from config.json."""
        try:
            ids = GenerationConfig.from_pretrained(self.folder, local_files_only=True).eos_token_id
        except OSError:
            ids = None
        if ids is None:
            ids = self._model.config.get_text_config(decoder=True).eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def identity(self) -> Identity:
        """Returns what a peer must agree with before pages are exchanged."""
        return Identity(model_fingerprint(self.folder), self.layout)

    @torch.inference_mode()
    def forward(
        self,
        store: PagedStore,
        tables: Sequence[BlockTable],
        position: int,
        token_ids: list[int],
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor:
        """Feeds `token_ids`, the tokens from `position` on. Their KV goes into the pages of `tables`, one per group.

        Returns the logits after the last one, float ``[vocab]``. `on_layers` is called meanwhile, as soon as the KV of
        as many layers as are written together has been computed (on a GPU: has been asked for, see `synchronize`).
        """
        cache = sequence_cache(store, tables, position, self._by_write(on_layers) if on_layers else None)
        ids = torch.tensor([token_ids], dtype=torch.long, device=self.device)
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **self._last_only)
        self.num_tokens_fed += len(token_ids)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def synchronize(self) -> None:
        """Waits until what was computed is in memory, so that another reader (NIXL) may have it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _by_write(self, on_layers: OnLayers) -> OnLayer:
        """Returns a function that is told of single layers and tells `on_layers` of those that are written together."""
        firsts = {(g, layers.stop): layers.start for g, writes in enumerate(self._writes) for layers in writes}

        def on_layer(group: int, layer: int) -> None:
            first = firsts.get((group, layer + 1))
            if first is not None:
                on_layers(group, first, layer + 1)

        return on_layer


def model_fingerprint(folder: Path) -> str:
    """Returns 16 hex digits for config and weights: equal on two machines that serve the same model.

    Weights are sampled (file sizes and 4 KiB at evenly spaced places), not read whole.
    """
    digest = hashlib.sha256()
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _NOT_IN_FINGERPRINT}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for index in range(_FINGERPRINT_SAMPLES):
                file.seek(size * index // _FINGERPRINT_SAMPLES)
                digest.update(file.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]
