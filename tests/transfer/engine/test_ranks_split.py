"""A model divided over ranks computes what the whole one computes; one that cannot be divided is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from transfer.engine.paged_cache import observe_layout
from transfer.engine.ranks.link import Link, sum_over
from transfer.engine.ranks.split import split_model
from transfer.errors import GeometryError
from transfer.plan.ranks import Rank

pytestmark = pytest.mark.engine

IDS = torch.tensor([[5, 300, 41, 41, 7, 250, 9, 33, 400, 12, 13]])


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def divided(folder: Path, size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` says of each rank's part; the ranks are threads."""
    pairs = [Link.pair(index) for index in range(1, size)]
    ends = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]

    models = [load(folder) for _ in range(size)]  # which transformers cannot do in several threads

    def be(index: int) -> Any:
        model = models[index]
        layout = observe_layout(model, 16)
        split_model(model, layout, Rank(size, index), lambda part: sum_over(ends[index], part))
        return work(model)

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(be, range(size)))
    finally:
        for one in (link for pair in pairs for link in pair):
            one.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "qwen3", "deepseek", "llama4"])
def test_every_rank_knows_the_whole_models_logits(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    parts = divided(folder, 2, logits)
    assert torch.equal(parts[0], parts[1])
    assert torch.allclose(parts[0], logits(load(folder)), atol=1e-9)


def test_a_rank_keeps_its_part_only(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model()
    whole = dict(load(folder).named_parameters())
    for parameters in divided(folder, 2, lambda model: dict(model.named_parameters())):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            full = f"model.layers.1.self_attn.{name}.weight"
            assert 2 * parameters[full].numel() == whole[full].numel()
            assert parameters[full].untyped_storage().nbytes() == parameters[full].nbytes


@pytest.mark.parametrize(("family", "size"), [("llama", 4), ("gpt_oss", 2)])
def test_what_the_plan_does_not_divide_is_refused(family: str, size: int, tiny_model: Callable[..., Path]) -> None:
    """Two KV heads are not four; and a plan without attention leaves every rank with all heads."""
    with pytest.raises(GeometryError, match=f"cannot be divided over {size} ranks.*lower tensor_parallel_size"):
        divided(tiny_model(family), size, logits)


def test_a_sum_that_is_none_is_noticed(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model())
    with pytest.raises(GeometryError, match="its logits would differ"):
        split_model(model, observe_layout(model, 16), Rank(2, 0), lambda part: part)
