"""Config files and objects are read in the same way: `load_config` finds one, `Attributes` asks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transfer.errors import GeometryError
from transfer.geometry.checks import first_line

_BY_CARD = {"gpt_oss": "bfloat16"}
"""The dtype of attention in models whose published config names none."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The names of dtypes in safetensors files."""
_MAX_HEADER_BYTES = 100 * 10**6
"""The longest header that safetensors itself reads."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def load_config(path: str | Path) -> object:
    """Returns the config in a model folder or a JSON file, ready for `kv_geometry`.

    It is a transformers config object where transformers knows the model type, otherwise the JSON object as it is. A
    dtype that it does not name is that of the weights beside it, as engines take it, or of the model's card.
    Nothing is downloaded and no code of the folder is run. Raises `GeometryError` where there is no config to be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GeometryError(f"there is no {file}; give a model's folder or its config.json") from None
    except OSError as error:
        raise GeometryError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GeometryError(f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(raw, dict):
        raise GeometryError(f"{file} holds a JSON {type(raw).__name__} where a config object is expected")
    if not _names_dtype(raw) and (dtype := _weights_dtype(file.parent) or _BY_CARD.get(str(raw.get("model_type")))):
        raw = {**raw, "dtype": dtype}
    return resolve_config(raw)


def _names_dtype(raw: Mapping[str, Any]) -> bool:
    parts = [raw, *(part for name in _TEXT_PARTS if isinstance(part := raw.get(name), Mapping))]
    return any(part.get(name) is not None for part in parts for name in ("dtype", "torch_dtype"))


def _weights_dtype(folder: Path) -> str | None:
    """Returns the dtype of the first tensor of floating point in the first file of weights, which is what transformers
    loads a model with whose config names none. Returns None where there is no such file, or it cannot be read."""
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        with suppress(OSError, ValueError, AttributeError), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
            found = (_DTYPES.get(one.get("dtype")) for name, one in tensors.items() if name != "__metadata__")
            return next(filter(None, found), None)
    return None


def unknown_type(config: object) -> str | None:
    """Returns the model type of a config that transformers does not know, so that only the names of its attributes say
    what the model is like; None where it does, or where there is no type."""
    return str(config["model_type"]) if isinstance(config, Mapping) and config.get("model_type") else None


def resolve_config(raw: Mapping[str, Any]) -> object:
    """Lets transformers fill in what the JSON leaves to its class. Returns a mapping as it is where transformers does
    not know the model type.

    Published configs leave out values that equal the class's default (Gemma-3 its head_dim, Jamba its layer pattern),
    so the JSON alone would mislead. Raises `GeometryError` where the class refuses the values.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        return raw
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return raw
    try:
        return CONFIG_MAPPING[model_type].from_dict(_without_mapped_head_dim(raw))
    except Exception as error:  # a border: the classes raise whatever their validators raise
        raise GeometryError(
            f"transformers cannot read this {model_type!r} config: {first_line(error)}; give --bytes-per-token"
        ) from error


def _without_mapped_head_dim(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an MLA config without its `head_dim`: some classes write it over `qk_rope_head_dim`, and nothing needs
    it."""
    has_latent = raw.get("kv_lora_rank") is not None
    return {
        name: _without_mapped_head_dim(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in raw.items()
        if not (has_latent and name == "head_dim")
    }


def text_part(config: object) -> object:
    """Returns the decoder's part of a multimodal config, or the config itself. Raises `GeometryError` where there are
    several."""
    if isinstance(config, Mapping):
        inner = next((config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), None)
        return config if inner is None else resolve_config(inner)
    if not hasattr(config, "get_text_config"):
        return getattr(config, "text_config", config)
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise GeometryError(f"the config has several text parts: {first_line(error)}; pass one of them") from error


class Attributes:
    """`Attributes` asks one config object or mapping, in the same way. An attribute that is None is the same as one
    that is not there."""

    def __init__(self, source: object, model_type: str | None = None) -> None:
        self._source = source
        self.model_type = str(self.get("model_type") if model_type is None else model_type)

    def get(self, *names: str) -> Any:
        """Returns the first of these attributes that is there, else None."""
        return next((value for name in names if (value := self._one(name)) is not None), None)

    def _one(self, name: str) -> Any:
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        try:
            return getattr(self._source, name, None)
        except Exception as error:  # a border: properties of config classes check other attributes
            what = f"{name} of this {type(self._source).__name__} cannot be read"
            raise GeometryError(f"{what}: {first_line(error)}; give --bytes-per-token") from error

    def has(self, name: str) -> bool:
        """Returns whether there is such an attribute. A config object has those of its class even when they are
        None."""
        return self.get(name) is not None or (not isinstance(self._source, Mapping) and hasattr(self._source, name))

    def count(self, *names: str) -> int | None:
        """Returns what `get` returns, for a positive integer; 0 counts as not there. Raises `GeometryError` for any
        other value."""
        value = self.get(*names)
        if value is None or (value == 0 and value is not False):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GeometryError(
                f"{names[0]} of the {self.model_type!r} config is {value!r}, which is no positive integer; "
                "give --bytes-per-token"
            )
        return value

    def need(self, flag: str, *names: str) -> int:
        """Returns what `count` returns. Raises `GeometryError`, which points at `flag`, where it is not there."""
        value = self.count(*names)
        if value is None:
            raise GeometryError(f"the {self.model_type!r} config has no {names[0]}; give it by hand with {flag}")
        return value

    def refuse(self, names: tuple[str, ...]) -> None:
        """Raises `GeometryError` where one of these attributes is there: it changes the KV in a way not known here."""
        for name in names:
            if self.get(name):
                raise GeometryError(
                    f"the {self.model_type!r} config has {name}, whose meaning only that model's own code knows; "
                    "give --bytes-per-token"
                )

    def layer(self, index: int) -> Attributes:
        """Returns the attributes as layer `index` has them: in some models (Gemma-4) they differ by layer.

        Such a config object raises when one of them is read from the whole.
        """
        if isinstance(self._source, Mapping):
            self.refuse(("per_layer_config",))
            return self
        if not getattr(self._source, "is_heterogeneous", False):
            return self
        return Attributes(self._source.per_layer_config[index], self.model_type)  # type: ignore[attr-defined]
