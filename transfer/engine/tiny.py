"""Tiny random models in a local folder. With them every path through the system runs offline, in milliseconds.

    python -m transfer.engine.tiny --out /tmp/tiny --family llama

The folder is what a Hugging Face checkpoint is: ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it. The weights are
random, but drawn so that attention is sharp and outweighs the embeddings. So the next token depends on the whole
context, and wrong bytes in a KV cache show in the text. No special token wins greedy decoding (their rows of the
output matrix are zero): answers end by length, by a stop string, or by a ``logit_bias`` on ``<|end|>``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    import torch

VOCABULARY_SIZE = 512
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip

PRINTABLE = "\t\n" + "".join(chr(code) for code in range(0x20, 0x7F))

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role not in ("system", "user", "assistant") %}
    {{- raise_exception("role must be system, user or assistant, not " ~ message.role) }}
  {%- endif %}
  {{- "<|" ~ message.role ~ "|>" }}
  {%- if message.content is string %}
    {{- message.content }}
  {%- else %}
    {%- for part in message.content or [] %}
      {%- if part.type != "text" %}
        {{- raise_exception("content parts must be of type text, not " ~ part.type) }}
      {%- endif %}
      {{- part.text }}
    {%- endfor %}
  {%- endif %}
  {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- "<|assistant|>" }}
{%- endif %}"""

CORPUS = """\
The lighthouse keeper counted the ships as they went by in the evening.
Every morning she opened the window and listened to the rain on the roof.
There is nothing quite like warm bread with butter and a little salt.
He asked the driver to wait, but the train had already left the station.
Two engines share the work: one of them reads and the other one writes.
Please bring the letters to the office before the clock strikes seven.
They walked along the river until the path ended at an old stone bridge.
What would you do if the answer to your question was another question?
The garden was full of apples, pears, plums and the humming of bees.
"I have never been there," said the captain, "and I never want to go."
A good map shows the mountains; a better one shows where water can be found.
When the storm was over, the children ran outside to look for the kite.
Numbers such as 1, 2, 3, 10, 25, 100 and 1984 were written on the wall.
It takes about thirty minutes to cross the valley, or less with a horse.
You should not carry more than you can hold, nor hold more than you need.
Her brother repairs clocks, radios and, on Sundays, the neighbours' bicycles.
Some of the oldest stories are about people who set out to find a home.
We were told that the museum would open again at the end of the month.
The more carefully you listen, the more there is to be heard in silence.
Nobody knows who planted the first trees on the far side of the island.
In winter the lake freezes over and the whole village goes out skating.
Think of a word, write it down, and then describe it without using it.
The baker's daughter could tell the weather by the colour of the smoke.
This machine was built to sort small stones by size, weight and shape.
If all goes well, the bridge will be finished before the first snow falls.
They shared what was left of the soup and talked until the fire was out.
An hour later the phone rang, but there was no one at the other end.
Look at the stars: some of them are further away than anyone can imagine.
Most questions have an answer, though not always the one you hoped for.
The teacher drew a large circle and asked where it began and where it ended.
From the top of the tower you can see three countries and a piece of the sea.
Our cat sleeps on the warmest chair and will not move for anyone.
Light travels quickly, good news travels slowly, and secrets travel best.
I would like to thank everyone who helped to carry the piano up the stairs.
The shop on the corner sells paper, pencils, ink, string and stamps.
After a long discussion they agreed to meet again on the following day.
""".splitlines(keepends=True)


class Family(StrEnum):
    """A `Family` names the real architecture that is imitated. Between them they have every KV layout the transfer must
    carry."""

    LLAMA = "llama"
    """A family with grouped-query attention, with all layers full."""
    GEMMA3 = "gemma3"
    """A family with sliding-window layers, a full layer after every second one, and qk-norm."""
    MISTRAL = "mistral"
    """A family with a sliding window in every layer, and no ``layer_types`` that would say so."""
    DEEPSEEK = "deepseek"
    """A family with multi-head latent attention (keys and values of different size) and a few experts."""
    QWEN3 = "qwen3"
    """A family with qk-norm, and a head size that is not hidden size / heads."""
    GPT_OSS = "gpt_oss"
    """A family with sliding-window and full layers in turn, an attention sink per head, biases, and a few experts."""
    LLAMA4 = "llama4"
    """A family with chunked-attention layers and full ones, which have no positions, in turn. The full ones have
    experts."""
    QWEN3_NEXT = "qwen3_next"
    """A family with linear-attention layers, whose state is no KV per token, then a full one. It cannot be paged."""


class Vocabulary(StrEnum):
    """A `Vocabulary` tells what text the tokens can be."""

    ASCII = "ascii"
    """Every token is printable ASCII. Accents are dropped from input, any other character becomes ``?``."""
    BYTES = "bytes"
    """The vocabulary is byte-level BPE over all 256 bytes: any text comes back exactly, characters are split across
    tokens."""


class Dtype(StrEnum):
    """A `Dtype` is that of the weights, and so of the KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[Family, dict[str, Any]] = {
    Family.LLAMA: {"model_type": "llama"},
    Family.GEMMA3: {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "query_pre_attn_scalar": 16,
    },
    Family.MISTRAL: {"model_type": "mistral", "sliding_window": 64},
    Family.DEEPSEEK: {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    Family.QWEN3: {"model_type": "qwen3", "head_dim": 32},
    Family.GPT_OSS: {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    Family.LLAMA4: {
        "model_type": "llama4_text",
        "num_hidden_layers": 6,
        "layer_types": ["chunked_attention", "full_attention"] * 3,
        "no_rope_layers": [1, 0] * 3,
        "attention_chunk_size": 64,
        "intermediate_size": 64,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "use_qk_norm": False,  # as in Maverick: normed queries of 16 elements could not be sharp
        "floor_scale": 16,  # a full layer scales its queries by their position: from the 16th token on, not the 8192nd
    },
    Family.QWEN3_NEXT: {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}

_WINDOWS = ("sliding_window", "attention_chunk_size")


def make_tiny_model(
    out: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocabulary: str = "ascii",
    max_model_len: int = 8192,
    dtype: str = "float32",
    window: int | None = None,
    shape: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint into the folder `out` (made if missing) and returns the folder.

    The same arguments give the same bytes. `family`, `vocabulary` and `dtype` are values of `Family`, `Vocabulary` and
    `Dtype`; raises ValueError for anything else. `window` replaces the 64 tokens of the sliding window, or of llama4's
    attention chunk. It is at least 2; raises ValueError where the family has none. `shape` replaces further members of
    the family's config. Needs torch.
    """
    out = Path(out)
    shape = _shape(Family(family), window) | dict(shape or {})
    tokenizer = make_tiny_tokenizer(out, vocabulary)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    config = AutoConfig.for_model(**shape | ids, max_position_embeddings=max_model_len, dtype=Dtype(dtype).value)
    if "num_experts_per_tok" in shape:
        config.experts_implementation = "eager"  # for config.json: what transformers chooses itself knows no float64
    model = _random_model(config, seed, zero_rows=tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)))
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(out)
    return out


def _shape(family: Family, window: int | None) -> dict[str, Any]:
    """Returns the config's own values for this family. Raises ValueError for a window that it cannot have."""
    shape = _COMMON | _FAMILIES[family]
    if window is None:
        return shape
    names = [name for name in _WINDOWS if name in shape]
    if not names:
        raise ValueError(f"{family} has no window that could be {window} tokens")
    if window < 2:  # transformers' own cache forgets nothing where the window is the token itself
        raise ValueError(f"a window has at least 2 tokens, not {window}")
    return shape | dict.fromkeys(names, window)


def make_tiny_tokenizer(out: str | Path, vocabulary: str = "ascii") -> PreTrainedTokenizerFast:
    """Writes only the tokenizer's files into the folder `out` and returns the tokenizer. No torch is needed or
    imported.

    Special tokens have the ids 0 to 5 in the order of `SPECIAL_TOKENS`. Encoding plain text puts ``<|begin|>`` first.
    The chat template does so itself, so its text is to be encoded with ``add_special_tokens=False``.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(Vocabulary(vocabulary)),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def _trained(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary is Vocabulary.ASCII:
        tokenizer.normalizer = _to_ascii()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = [byte_level.pre_tokenize_str(character)[0][0] for character in PRINTABLE]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def _to_ascii() -> normalizers.Normalizer:
    other = Regex(r"[^\t\n -~]")
    return normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Replace(other, "?")])


def _random_model(config: Any, seed: int, zero_rows: list[int]) -> Any:
    """Returns a model of this config whose weights come from one generator, in the order of the parameters' names."""
    import torch  # imported here, because a tokenizer alone needs no torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):  # what it draws is overwritten; the caller's draws stay as they are
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            _fill(name, parameter, generator)
        model.get_output_embeddings().weight[zero_rows] = 0
    return model


_GAINS = {"embed_tokens": 0.05, "q_proj": 4.0, "q_b_proj": 4.0, "lm_head": 3.0}
"""The standard deviations of a module's output for an input of size 1. Every other matrix has 1 (experts that are
stored the other way round, inputs first, a little less).

Queries of 4 make attention pick few tokens instead of averaging all; embeddings of 0.05 are outweighed by it. Logits
then spread by 3: the two best are 0.7 apart in the median, while reading a prompt in pieces moves them by about 0.00002
in float32.
"""


_BIAS = 0.1
"""The standard deviation of biases. It is large enough to show where a bias is left out."""


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Draws everything that the model's class draws or leaves empty. Norms that start at 1 stay as they are."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module.endswith("bias"):
        parameter.normal_(0.0, _BIAS, generator=generator)
    elif parameter.dim() > 1:
        fan_in = 1 if module == "embed_tokens" else parameter.shape[-1]
        parameter.normal_(0.0, _GAINS.get(module, 1.0) * fan_in**-0.5, generator=generator)
    elif module == "sinks":
        parameter.normal_(0.0, 1.0, generator=generator)
    elif module == "A_log":
        parameter.normal_(-3.0, 1.0, generator=generator)  # a state that forgets over some twenty tokens
    elif module in ("q_norm", "k_norm"):
        parameter.add_(1.0)  # doubles the output, whether the weight is stored as w = 1 or, as Gemma does, w - 1 = 0


def main(
    out: Annotated[Path, typer.Option(help="Folder to write; made if missing.")],
    family: Annotated[Family, typer.Option(help="Architecture to imitate.")] = Family.LLAMA,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    vocabulary: Annotated[Vocabulary, typer.Option(help="Text the tokens can be.")] = Vocabulary.ASCII,
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens, prompt and answer together.")] = 8192,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.FLOAT32,
    window: Annotated[int | None, typer.Option(min=2, help="Tokens of the window, where there is one.")] = None,
) -> None:
    """Write a tiny random model with its tokenizer."""
    if find_spec("torch") is None:
        way_out = "pip install 'pdproxy[engine]' (in a checkout: scripts/install engine)"
        sys.exit(f"error: this Python has no torch; {way_out}")
    disable_progress_bar()
    try:
        _shape(family, window)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--window") from error
    make_tiny_model(
        out, family, seed=seed, vocabulary=vocabulary, max_model_len=max_model_len, dtype=dtype, window=window
    )
    typer.echo(f"{out}: {family} of seed {seed}, {vocabulary} vocabulary of {VOCABULARY_SIZE}, {dtype}")


if __name__ == "__main__":
    typer.run(main)
