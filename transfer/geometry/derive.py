"""The step from a config to a geometry: all layers together, or one by one."""

from __future__ import annotations

from dataclasses import replace

from transfer.errors import GeometryError
from transfer.geometry.checks import positive
from transfer.geometry.groups import KvGeometry, LayerGroup, merge
from transfer.geometry.layers import RankStorage, layer_group
from transfer.geometry.model import ByHand, Model
from transfer.geometry.states import state_bytes


def kv_geometry(
    config: object,
    *,
    tp_size: int = 1,
    kv_cache_dtype: str | None = None,
    cache: str = "latent",
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    bytes_per_token: int | None = None,
    bytes_per_sequence: int | None = None,
) -> KvGeometry:
    """Returns the KV of one of `tp_size` ranks.

    `config` is a transformers config object or the mapping found in a config.json; both give the same answer.
    `kv_cache_dtype` None or ``"auto"`` means the model's own dtype. `cache` says what an engine stores of MLA:
    ``"latent"`` (one compressed vector, whole on every rank) or ``"expanded"`` (K and V of every head).

    The other arguments are given by hand and take precedence over the config: `num_layers`, `num_kv_heads` and
    `head_dim` of the whole model, `dtype` of the model; `bytes_per_token` and `bytes_per_sequence` of this rank, all
    layers together. With `bytes_per_token` the config is not looked at.

    Raises `GeometryError` where the config does not tell what is needed.
    """
    by_hand = ByHand(num_layers, num_kv_heads, head_dim, dtype, bytes_per_sequence)
    positive("tp_size", tp_size)
    expanded = _is_expanded(cache)
    if bytes_per_token is not None:
        return _given(positive("bytes_per_token", bytes_per_token), bytes_per_sequence)
    model = Model(config, by_hand)
    return _measured(model, RankStorage(tp_size, model.element_bytes(kv_cache_dtype), expanded))


def _given(bytes_per_token: int, bytes_per_sequence: int | None) -> KvGeometry:
    groups = [LayerGroup("full", 0, bytes_per_token)]
    if bytes_per_sequence is not None:
        groups.append(LayerGroup("linear", 0, 0, bytes_per_sequence=bytes_per_sequence))
    return KvGeometry(tuple(groups))


def layer_groups(
    config: object, *, tp_size: int = 1, kv_cache_dtype: str | None = None, cache: str = "latent"
) -> list[LayerGroup | None]:
    """Returns each layer of the model as a group of its own, in order; None for one that keeps no KV of its own.

    Arguments and errors are those of `kv_geometry`, which is this list added up.
    """
    model = Model(config, ByHand())
    return _by_layer(
        model, RankStorage(positive("tp_size", tp_size), model.element_bytes(kv_cache_dtype), _is_expanded(cache))
    )


def _is_expanded(cache: str) -> bool:
    if cache not in ("latent", "expanded"):
        raise GeometryError(f"cache must be 'latent' or 'expanded', not {cache!r}")
    return cache == "expanded"


def _measured(model: Model, rank: RankStorage) -> KvGeometry:
    given = model.by_hand.bytes_per_sequence
    groups = merge(layer for layer in _by_layer(model, rank) if layer is not None)
    return KvGeometry(tuple(groups if given is None else _with_states(groups, given)))


def _by_layer(model: Model, rank: RankStorage) -> list[LayerGroup | None]:
    return [_layer(model, index, rank) if model.keeps_kv(index) else None for index in range(model.num_layers)]


def _layer(model: Model, index: int, rank: RankStorage) -> LayerGroup:
    layer = layer_group(model, index, rank)
    if layer.kind == "linear" and model.by_hand.bytes_per_sequence is None:
        return replace(layer, bytes_per_sequence=state_bytes(model, index, rank))
    return layer


def _with_states(groups: list[LayerGroup], bytes_per_sequence: int) -> list[LayerGroup]:
    """Puts the size given by hand where the states are. Raises `GeometryError` where there are none."""
    if not any(group.kind == "linear" for group in groups):
        raise GeometryError("no layer of this model has a state per sequence; --bytes-per-sequence means nothing")
    return [replace(g, bytes_per_sequence=bytes_per_sequence) if g.kind == "linear" else g for g in groups]
