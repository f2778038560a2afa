"""The split divides a loaded model over tensor-parallel ranks, as its own plan in transformers says.

A layer that the plan calls ``colwise`` keeps the rows of its weight that are this rank's. A layer that it calls
``rowwise`` keeps the columns, and its outputs are summed over all ranks. Everything else that the plan names stays
whole on every rank, which is right and saves nothing. The result is not taken on trust: a few tokens are fed before and
after, the logits must be the same within rounding, and every rank must cache just the heads that the transfer expects
of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from transfer.errors import GeometryError
from transfer.plan.layout import KvLayout
from transfer.plan.ranks import Rank, heads_of

AddUp = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns the sum of a tensor over all ranks."""
NUM_PROBE_TOKENS = 8
"""The number of tokens that are fed before and after, to compare the logits."""


def split_model(model: Any, layout: KvLayout, rank: Rank, add_up: AddUp) -> None:
    """Leaves of `model` only what is `rank`'s. `layout` is the whole model's. All ranks do this at the same time.

    Raises `GeometryError` for a model whose plan does not divide it. Such a model is of no use any more.
    """
    whole = _probe(model, layout, None)
    try:
        _cut(model, rank, add_up)
        parts = _probe(model, layout, rank)
    except RuntimeError as error:  # shapes that do not fit: the plan cuts through a head
        raise _refusal(model, rank, str(error)) from error
    difference = (parts - whole).abs().max().item() / max(1.0, whole.abs().max().item())
    if not difference < math.sqrt(torch.finfo(model.dtype).eps):
        raise _refusal(model, rank, f"its logits would differ by {difference:.1e} from those of the whole model")


def _cut(model: Any, rank: Rank, add_up: AddUp) -> None:
    plan = model.tp_plan or {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if not isinstance(module, torch.nn.Linear) or style not in ("colwise", "rowwise"):
            continue
        dim = 0 if style == "colwise" else 1
        if module.weight.shape[dim] % rank.size:
            raise _refusal(model, rank, f"{name} has {module.weight.shape[dim]} {('rows', 'columns')[dim]}")
        module.weight = _part(module.weight, dim, rank)
        module.out_features, module.in_features = module.weight.shape
        if dim == 0 and module.bias is not None:
            module.bias = _part(module.bias, 0, rank)
        elif dim == 1:
            if rank.index > 0:
                module.register_parameter("bias", None)  # only rank 0 adds it, so it is added once
            module.register_forward_hook(lambda _module, _inputs, output: add_up(output))


def _part(weight: torch.Tensor, dim: int, rank: Rank) -> torch.nn.Parameter:
    """Returns this rank's part, copied, so that the whole can be freed."""
    part = weight.detach().chunk(rank.size, dim)[rank.index].clone()
    return torch.nn.Parameter(part, requires_grad=False)


@torch.inference_mode()
def _probe(model: Any, layout: KvLayout, rank: Rank | None) -> torch.Tensor:
    """Returns the logits of a few tokens, ``[tokens, vocab]``.

    With a `rank`, raises `GeometryError` unless that rank's heads are cached.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.arange(NUM_PROBE_TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].double()
    for index, (layer, seen) in enumerate(zip(layout.layers, cache.layers, strict=True)):
        if rank is None or layer is None:
            continue
        wanted, num_heads = len(heads_of(layer.num_heads, rank)), seen.keys.shape[1]
        if num_heads != wanted:
            raise _refusal(model, rank, f"layer {index} would cache {num_heads} heads on a rank instead of {wanted}")
    return logits


def _refusal(model: Any, rank: Rank, why: str) -> GeometryError:
    return GeometryError(
        f"{type(model).__name__} cannot be divided over {rank.size} ranks by the plan that transformers has for it: "
        f"{why}; lower tensor_parallel_size"
    )
