"""The module finds the folder of a model that is named as on the Hugging Face hub, in this machine's cache.

The engines have filled that cache. The module fetches nothing: a proxy that starts waits for nobody.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG = "config.json"


def model_folder(model: Path) -> Path:
    """Returns the folder of `model`, or `model` itself where it exists, or where the cache has nothing of that name."""
    if model.exists() or not _NAME.fullmatch(str(model)):
        return model
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(model), _CONFIG)
    return Path(found).parent if isinstance(found, str) else model
