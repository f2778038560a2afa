"""A digest of what a prompt's KV was computed from, so that a decoder does not read the KV of another prompt.

The prefiller's vLLM and the decoder's each make tokens out of a body. Where one of them has another chat template,
tokenizer, image or LoRA adapter, the number of tokens may still be the same. vLLM's own block hashes cannot be compared
instead: their algorithm and seed are options of each engine.

It knows vLLM's requests by the attributes it reads, and imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import torch

from transfer.wire import Count, Name

_encoder = msgspec.msgpack.Encoder()


class PromptDigest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `PromptDigest` has a digest of each thing that the KV of a prompt depends on. A digest is empty where the
    prompt has no such thing."""

    num_tokens: Count
    tokens: Name = ""
    """A digest of the ids, all but the last, which the decoder computes itself."""
    embeddings: Name = ""
    """A digest of the vectors that a client gave instead of tokens, and of the places that have them."""
    adapter: Name = ""
    """A digest of the LoRA adapter's name."""
    places: Name = ""
    """A digest of the places of multimodal inputs: kind, offset and length of each."""
    inputs: Name = ""
    """A digest of the identifiers of multimodal inputs. They are compared only where `namer` is equal on both sides."""
    namer: Name = ""
    """Tells how the engine makes those identifiers."""
    salt: Name = ""
    """A digest of the salt that keeps one client's KV from others."""

    def differences(self, here: PromptDigest) -> list[str]:
        """Returns what is unequal in the prompt `here`, in words for a log."""
        if self.num_tokens != here.num_tokens:
            return [f"the number of tokens ({self.num_tokens} there, {here.num_tokens} here)"]
        words = {
            "tokens": "the tokens",
            "embeddings": "the prompt's embeddings",
            "adapter": "the LoRA adapter",
            "places": "the places of images and other inputs",
            "salt": "the cache salt",
        }
        if self.namer == here.namer:
            words["inputs"] = "the images or other inputs"
        return [text for name, text in words.items() if getattr(self, name) != getattr(here, name)]


def prompt_digest(request: Any, namer: str = "") -> PromptDigest:
    """Returns the digest of a request of vLLM's. `namer` tells how this engine names multimodal inputs. Where it is
    empty, their names mean nothing elsewhere."""
    adapter, features = request.lora_request, request.mm_features
    places = [(one.modality, one.mm_position.offset, one.mm_position.length) for one in features]
    return PromptDigest(
        num_tokens=request.num_prompt_tokens,
        tokens=_tokens(request.prompt_token_ids or ()),
        embeddings=_embeddings(request),
        adapter=_short(adapter.lora_name) if adapter else "",
        places=_short(places) if places else "",
        inputs=_short([one.identifier for one in features]) if features and namer else "",
        namer=_short(namer) if features and namer else "",
        salt=_short(request.cache_salt) if request.cache_salt else "",
    )


def _tokens(ids: Any) -> str:
    """Returns the digest of all of these ids but the last. This runs on the loop of vLLM's scheduler: the list is not
    copied, and msgpack is the fastest way to bytes that are the same everywhere."""
    if not ids:
        return ""
    encoded = memoryview(_encoder.encode(ids))
    if len(ids) > 1:
        encoded = encoded[: -len(_encoder.encode(ids[-1]))]
    return hashlib.sha256(encoded).hexdigest()[:32]


def _embeddings(request: Any) -> str:
    vectors = request.prompt_embeds
    if vectors is None:
        return ""
    mask = getattr(request, "prompt_is_token_ids", None)  # of the places without a vector; some releases know none
    digest = hashlib.sha256(_encoder.encode([str(vectors.dtype), list(vectors.shape), mask]))
    digest.update(vectors[:-1].contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _short(value: object) -> str:
    return hashlib.sha256(_encoder.encode(value)).hexdigest()[:16]
