"""The fixed-size state that linear-attention and state-space layers keep per sequence."""

from __future__ import annotations

from transfer.errors import GeometryError
from transfer.geometry.config import Attributes
from transfer.geometry.layers import RankStorage
from transfer.geometry.model import Model

# The recurrent part is accumulated in float32, whatever the model's dtype is.
_RECURRENT_ELEMENT_BYTES = 4
_FLAG = "--bytes-per-sequence"


def state_bytes(model: Model, index: int, rank: RankStorage) -> int:
    """Returns the bytes of layer `index`: the recurrent state, and the last inputs of its convolution in the model's
    dtype."""
    layer = model.text.layer(index)
    if layer.count("linear_num_value_heads") is not None:
        recurrent, conv = _delta_net(layer, rank)
    elif layer.count("mamba_d_state") is not None and layer.count("mamba_n_heads", "n_mamba_heads") is None:
        recurrent, conv = _mamba(layer, rank)
    else:
        raise GeometryError(
            f"the {layer.model_type!r} config has layers with a state, but neither linear_num_value_heads nor the "
            f"mamba_d_state of a first-generation Mamba; give the size of all states together with {_FLAG}"
        )
    return recurrent * _RECURRENT_ELEMENT_BYTES + conv * model.element_bytes()


def _delta_net(layer: Attributes, rank: RankStorage) -> tuple[int, int]:
    """Returns the elements of a gated delta net (Qwen3-Next): `(recurrent, convolution)`."""
    value_heads = _heads(layer, rank, "linear_num_value_heads")
    key_heads = _heads(layer, rank, "linear_num_key_heads")
    key_dim = layer.need(_FLAG, "linear_key_head_dim")
    value_dim = layer.need(_FLAG, "linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return value_heads * key_dim * value_dim, channels * (layer.need(_FLAG, "linear_conv_kernel_dim") - 1)


def _heads(layer: Attributes, rank: RankStorage, name: str) -> int:
    return rank.share(name, layer.need(_FLAG, name))


def _mamba(layer: Attributes, rank: RankStorage) -> tuple[int, int]:
    """Returns the elements of a first-generation Mamba layer (Jamba): `(recurrent, convolution)`."""
    inner = layer.need(_FLAG, "mamba_expand") * layer.need(_FLAG, "hidden_size")
    channels = rank.share("mamba_expand × hidden_size", inner)
    return channels * layer.need(_FLAG, "mamba_d_state"), channels * (layer.need(_FLAG, "mamba_d_conv") - 1)
