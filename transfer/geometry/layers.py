"""The bytes of one layer on one rank, for each kind of attention and state."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import GeometryError
from transfer.geometry.config import Attributes
from transfer.geometry.groups import LayerGroup
from transfer.geometry.model import ByHand, Model

_KIND_OF_LAYER_TYPE = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "mla",
    "deepseek_sparse_attention": "mla",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
}
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_BY_HAND = "--bytes-per-token"

# Model types whose attention has one KV head per query head and whose configs have no attribute to say so.
_MULTI_HEAD = frozenset({"bloom", "codegen", "gpt2", "gpt_neox", "gptj", "mpt", "opt", "persimmon"})

# The sparse indexer keeps one fp8 key of `index_head_dim` elements, and a float32 scale for every 128 of them.
_INDEX_SCALE_GROUP, _INDEX_SCALE_BYTES = 128, 4


@dataclass(frozen=True, slots=True)
class RankStorage:
    """A `RankStorage` tells how one rank stores KV."""

    tp_size: int
    element_bytes: int
    expanded: bool
    """True where MLA's K and V of every head are stored instead of the latent they are made from."""

    def kv_heads(self, heads: int) -> int:
        """Returns the KV heads of this rank. Heads are divided over ranks, and repeated where there are fewer heads
        than ranks."""
        if heads % self.tp_size and self.tp_size % heads:
            raise GeometryError(f"{heads} KV heads can be neither divided over nor repeated on {self.tp_size} ranks")
        return max(1, heads // self.tp_size)

    def share(self, name: str, count: int) -> int:
        """Returns this rank's share of something that cannot be repeated, so that it must divide evenly. Raises
        `GeometryError` otherwise."""
        if count % self.tp_size:
            raise GeometryError(f"{name} = {count} cannot be divided over {self.tp_size} ranks")
        return count // self.tp_size


def layer_group(model: Model, index: int, rank: RankStorage) -> LayerGroup:
    """Returns layer `index` as a group of its own. States are left at 0 bytes: `transfer.geometry.states` knows
    them."""
    layer_type = model.layer_types[index]
    layer = model.text.layer(index)
    kind = _KIND_OF_LAYER_TYPE.get(layer_type)
    if kind is None:
        raise GeometryError(
            f"layer_types of the {layer.model_type!r} config has {layer_type!r}, whose KV is not known here; "
            f"give {_BY_HAND}"
        )
    if kind == "linear":
        return LayerGroup(kind, 1, 0)
    window = _window(kind, layer)
    if layer.count("kv_lora_rank") is not None:
        num_bytes = _mla_bytes(model.by_hand, layer, rank)
        if window is not None:
            return LayerGroup(kind, 1, num_bytes, window)
        return LayerGroup("full" if rank.expanded else "mla", 1, num_bytes + _index_key_bytes(layer, index))
    if kind == "mla":
        raise GeometryError(
            f"the {layer.model_type!r} config has {layer_type} layers but no kv_lora_rank; give {_BY_HAND}"
        )
    return LayerGroup(kind, 1, _attention_bytes(model.by_hand, layer, kind, rank), window)


def _window(kind: str, layer: Attributes) -> int | None:
    if kind == "sliding":
        return layer.need(_BY_HAND, "sliding_window")
    return layer.need(_BY_HAND, "attention_chunk_size") if kind == "chunked" else None


def _attention_bytes(by_hand: ByHand, layer: Attributes, kind: str, rank: RankStorage) -> int:
    """Returns `kv_heads · (head_dim + v_head_dim) · element` in bytes. MiMo's windowed layers have numbers of their
    own, ``swa_…``."""
    own = "swa_" if kind == "sliding" else ""
    head_dim = by_hand.head_dim or layer.count(own + "head_dim", "head_dim", "kv_channels") or _even_head_dim(layer)
    v_head_dim = layer.count(own + "v_head_dim", "v_head_dim") or head_dim
    heads = by_hand.num_kv_heads or _num_kv_heads(layer, kind)
    return rank.kv_heads(heads) * (head_dim + v_head_dim) * rank.element_bytes


def _num_kv_heads(layer: Attributes, kind: str) -> int:
    if layer.get("multi_query") and not layer.get("new_decoder_architecture"):
        return 1  # Falcon and StarCoder, whatever their num_kv_heads says
    if layer.model_type in _MULTI_HEAD:
        return layer.need("--num-kv-heads", *_HEADS)
    if kind == "sliding" and (own := layer.count("swa_num_key_value_heads")) is not None:
        return own
    heads = layer.need("--num-kv-heads", "num_key_value_heads", "num_kv_heads")
    return 2 * heads if kind == "sliding" and layer.model_type == "mimo_v2_flash" else heads


def _even_head_dim(layer: Attributes) -> int:
    """Returns the head size of configs without `head_dim`. By convention it is the hidden size divided over the
    heads."""
    hidden = layer.count("hidden_size", "n_embd", "d_model")
    heads = layer.count(*_HEADS)
    if hidden is None or heads is None or hidden % heads:
        raise GeometryError(
            f"the {layer.model_type!r} config has no head_dim, and hidden_size ({hidden}) is no multiple of "
            f"num_attention_heads ({heads}); give it by hand with --head-dim"
        )
    return hidden // heads


def _mla_bytes(by_hand: ByHand, layer: Attributes, rank: RankStorage) -> int:
    """Returns the bytes per token of multi-head latent attention. Its `head_dim` is not looked at: it says 64 where a
    token has 576 elements."""
    if by_hand.num_kv_heads or by_hand.head_dim:
        raise GeometryError(
            f"{layer.model_type!r} has latent attention (kv_lora_rank), which --num-kv-heads and --head-dim do not "
            f"describe; give {_BY_HAND}"
        )
    rope = layer.need(_BY_HAND, "qk_rope_head_dim")
    if rank.expanded:
        per_head = layer.need(_BY_HAND, "qk_nope_head_dim") + rope + layer.need(_BY_HAND, "v_head_dim")
        elements = rank.share("num_attention_heads", layer.need(_BY_HAND, *_HEADS)) * per_head
    else:
        elements = layer.need(_BY_HAND, "kv_lora_rank") + rope
    return elements * rank.element_bytes


def _index_key_bytes(layer: Attributes, index: int) -> int:
    """Returns the bytes of the sparse indexer's key, 132 for 128 elements: fp8 whatever the KV's dtype, and whole on
    every rank.

    A layer that reuses the selection of the layer before has no indexer, hence no key.
    """
    size = layer.count("index_head_dim")
    reuses = (layer.get("indexer_types") or [])[index : index + 1] == ["shared"]
    if size is None or reuses:
        return 0
    return size + -(-size // _INDEX_SCALE_GROUP) * _INDEX_SCALE_BYTES
