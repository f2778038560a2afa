"""Tiny checkpoints: loaded like real ones, the same from the same seed, and random enough to show a wrong KV cache."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer.testing import CliRunner

from transfer.engine import tiny
from transfer.engine.cache_need import cache_need
from transfer.engine.model import ModelRunner
from transfer.engine.paged_cache import PagedStore, observe_layout
from transfer.engine.tiny import BEGIN, END, PRINTABLE, SPECIAL_TOKENS, VOCABULARY_SIZE, Family, make_tiny_model
from transfer.errors import GeometryError
from transfer.geometry import kv_geometry, load_config, num_skipped_tokens

FAMILIES = list(Family)
WINDOWED = [Family.GEMMA3, Family.MISTRAL, Family.GPT_OSS, Family.LLAMA4]
WINDOW, CHUNK = 24, 16
NUM_SPECIAL = len(SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def checkpoints(tiny_model):
    """One folder per family, seed 0."""
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def windowed(tiny_model):
    """The families that have a window, with one that is no multiple of the chunk."""
    return {family: tiny_model(family, window=WINDOW) for family in WINDOWED}


@pytest.fixture(scope="module")
def ascii_tokenizer(checkpoints):
    return AutoTokenizer.from_pretrained(checkpoints[Family.LLAMA])


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tiny.make_tiny_tokenizer(folder, "bytes")
    return AutoTokenizer.from_pretrained(folder)


def fingerprint(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module", params=FAMILIES)
def answered(checkpoints, request):
    """A model, and the ids of a prompt with the 150 that it answers greedily."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[request.param])
    model = AutoModelForCausalLM.from_pretrained(checkpoints[request.param]).eval()
    prompt = torch.tensor([tokenizer.encode("Tell me about the sea.")])
    return model, model.generate(prompt, max_new_tokens=150)


@torch.inference_mode()
def logits_in_pieces(model, ids, size):
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache).logits[0] for piece in ids.split(size, dim=1)]
    return torch.cat(pieces)


def test_greedy_answers_are_varied_and_without_special_tokens(answered):
    generated = answered[1][0, -150:].tolist()
    assert len(set(generated)) > 75
    assert min(generated) >= NUM_SPECIAL


def test_the_best_token_is_far_ahead_of_rounding(answered):
    """So reading a prompt whole, in pieces or token by token hardly ever gives another token."""
    model, ids = answered
    whole = logits_in_pieces(model, ids, ids.shape[1])
    error = max(float((whole - logits_in_pieces(model, ids, size)).abs().max()) for size in (1, 64))
    best = whole.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert float(gaps.median()) > 1000 * error
    assert float((gaps < 2 * error).float().mean()) < 0.01


def test_the_next_token_depends_on_the_whole_context(answered):
    """Another token anywhere in the window moves everything that follows: so would wrong bytes in the cache."""
    model, ids = answered
    other = ids.clone()
    other[0, -50] = NUM_SPECIAL + (ids[0, -50] - NUM_SPECIAL + 7) % (VOCABULARY_SIZE - NUM_SPECIAL)
    before, after = (logits_in_pieces(model, each, each.shape[1]) for each in (ids, other))
    moved = (before - after).abs().amax(-1)
    assert float(moved[:-50].max()) < 0.001
    assert float(moved[-49:].min()) > 0.05
    assert float((before.argmax(-1) != after.argmax(-1))[-49:].float().mean()) > 0.2


def test_families_have_the_kv_layouts_they_are_here_for(checkpoints):
    configs = {family: AutoConfig.from_pretrained(folder) for family, folder in checkpoints.items()}
    assert all(config.vocab_size == VOCABULARY_SIZE for config in configs.values())
    assert configs[Family.LLAMA].num_key_value_heads < configs[Family.LLAMA].num_attention_heads
    assert set(configs[Family.GEMMA3].layer_types) == {"sliding_attention", "full_attention"}
    assert configs[Family.GEMMA3].sliding_window == configs[Family.MISTRAL].sliding_window == 64
    assert configs[Family.DEEPSEEK].kv_lora_rank == 32
    assert configs[Family.QWEN3].head_dim * configs[Family.QWEN3].num_attention_heads != 128


def test_windows_are_where_they_are_said_to_be(checkpoints):
    geometries = {family: kv_geometry(load_config(checkpoints[family])) for family in FAMILIES}
    kinds = {f: [(g.kind, g.num_layers, g.window) for g in geometry.groups] for f, geometry in geometries.items()}
    assert kinds == {
        Family.LLAMA: [("full", 4, None)],
        Family.GEMMA3: [("full", 2, None), ("sliding", 4, 64)],
        Family.MISTRAL: [("sliding", 4, 64)],
        Family.DEEPSEEK: [("mla", 3, None)],
        Family.QWEN3: [("full", 4, None)],
        Family.GPT_OSS: [("full", 2, None), ("sliding", 2, 64)],
        Family.LLAMA4: [("full", 3, None), ("chunked", 3, 64)],
        Family.QWEN3_NEXT: [("full", 1, None), ("linear", 3, None)],
    }


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_is_an_option(windowed, family):
    groups = kv_geometry(load_config(windowed[family])).groups
    assert [group.window for group in groups if group.kind != "full"] == [WINDOW]


@pytest.mark.parametrize(("family", "window"), [("llama", 8), ("qwen3_next", 8), ("gemma3", 1), ("llama4", 0)])
def test_a_window_that_cannot_be_is_a_value_error(tmp_path, family, window):
    with pytest.raises(ValueError, match=str(window)):
        make_tiny_model(tmp_path, family, window=window)
    assert not list(tmp_path.iterdir())


@torch.inference_mode()
def moved_by_wrong_bytes(model, ids, behind_edge):
    """How far wrong values of one token in the windowed layers' cache move the logits after `ids`.

    The token is `behind_edge` tokens behind the first one that will still be read.
    """
    kinds = {"sliding_attention": "sliding", "chunked_attention": "chunked"}
    (kind,) = {kinds[t] for t in getattr(model.config, "layer_types", ["sliding_attention"]) if t in kinds}
    num_read = ids.shape[1] - 1
    edge = num_skipped_tokens(kind, num_read, WINDOW) - (num_read - WINDOW + 1)  # such a layer keeps WINDOW - 1 tokens
    after = []
    for wrong in (False, True):
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], past_key_values=cache)
        for layer in cache.layers:
            if layer.is_sliding and wrong:
                layer.values[:, :, edge - behind_edge] *= -1
        after.append(model(ids[:, -1:], past_key_values=cache).logits)
    return float((after[1] - after[0]).abs().max())


@pytest.mark.parametrize("family", WINDOWED)
def test_wrong_bytes_show_at_the_very_edge_of_the_window(windowed, family):
    model = AutoModelForCausalLM.from_pretrained(windowed[family]).eval()
    prompts = torch.randint(NUM_SPECIAL, VOCABULARY_SIZE, (4, 1, 62), generator=torch.Generator().manual_seed(0))
    assert min(moved_by_wrong_bytes(model, ids, 0) for ids in prompts) > 0.05
    if family is Family.LLAMA4:  # there the cache still has tokens of the chunk before
        assert moved_by_wrong_bytes(model, prompts[0], 1) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_the_same_in_double_precision_and_runs_in_half(checkpoints, family):
    prompt = torch.randint(NUM_SPECIAL, VOCABULARY_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    answers = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=dtype).eval()
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        answers[dtype] = model.generate(prompt, max_new_tokens=16)[0, 20:].tolist()
    assert answers[torch.float32] == answers[torch.float64]
    assert min(answers[torch.bfloat16]) >= NUM_SPECIAL
    assert len(set(answers[torch.bfloat16])) > 4


def greedy_through_the_engine(runner, store, prompt, count):
    """The prompt chunk by chunk, then token by token."""
    need = cache_need(runner.layout.kv.groups, CHUNK, len(prompt) + count)
    tables, tokens, answer = need.tables(range(need.num_pages)), list(prompt), []
    for start in range(0, len(prompt), CHUNK):
        logits = runner.forward(store, tables, start, tokens[start : start + CHUNK])
    while len(answer) < count:
        answer.append(int(logits.argmax()))
        logits = runner.forward(store, tables, len(prompt) + len(answer) - 1, answer[-1:])
    return answer


@pytest.mark.parametrize("family", WINDOWED)
def test_the_engine_answers_as_generate_does_around_windows_and_chunks(windowed, family):
    runner = ModelRunner(windowed[family], device="cpu", dtype="float64", chunk_size=CHUNK)
    store = PagedStore(runner.layout, 18, runner.device)
    model = AutoModelForCausalLM.from_pretrained(windowed[family], dtype=torch.float64).eval()
    ids = torch.randint(NUM_SPECIAL, VOCABULARY_SIZE, (1, 80), generator=torch.Generator().manual_seed(0))
    for length in [n for n in range(1, 81) if n % 8 in (7, 0, 1)]:  # windows and chunks begin at multiples of 8
        expected = model.generate(ids[:, :length], max_new_tokens=3)[0, length:].tolist()
        assert greedy_through_the_engine(runner, store, ids[0, :length].tolist(), 3) == expected, length


def test_the_engine_refuses_layers_whose_state_it_cannot_page(checkpoints):
    with pytest.raises(GeometryError, match="LinearAttentionLayer"):
        ModelRunner(checkpoints[Family.QWEN3_NEXT], device="cpu", dtype="auto", chunk_size=CHUNK)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[Family.QWEN3_NEXT])
    with pytest.raises(GeometryError, match="LinearAttentionLayer"):
        observe_layout(model, CHUNK)


def test_options_reach_the_files(tmp_path):
    folder = make_tiny_model(tmp_path / "new" / "folder", "qwen3", max_model_len=512, dtype="bfloat16")
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 512
    assert {weight.dtype for weight in AutoModelForCausalLM.from_pretrained(folder).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("wrong", [{"family": "gpt"}, {"vocabulary": "latin"}, {"dtype": "int8"}])
def test_what_there_is_not_is_a_value_error(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        make_tiny_model(tmp_path, **wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_bytes(checkpoints, tmp_path, family):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    again = fingerprint(make_tiny_model(tmp_path / "0", family))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert again == fingerprint(checkpoints[family])
    other = fingerprint(make_tiny_model(tmp_path / "1", family, seed=1))
    assert {name for name in again if again[name] != other[name]} == {"model.safetensors"}


def test_a_tokenizer_needs_no_torch_and_is_the_same_in_another_process(checkpoints, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from transfer.engine.tiny import make_tiny_tokenizer\n"
        "from transformers import AutoTokenizer\n"
        "make_tiny_tokenizer(sys.argv[1])\n"
        "print(AutoTokenizer.from_pretrained(sys.argv[2]).encode('Hello, sea!'))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(checkpoints[Family.MISTRAL])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    ids = AutoTokenizer.from_pretrained(checkpoints[Family.MISTRAL]).encode("Hello, sea!")
    assert output.splitlines()[-1] == str(ids)
    assert fingerprint(tmp_path).items() <= fingerprint(checkpoints[Family.MISTRAL]).items()


def test_every_ascii_token_is_printable_text(ascii_tokenizer):
    assert len(ascii_tokenizer) == VOCABULARY_SIZE
    for token_id in range(VOCABULARY_SIZE):
        text = ascii_tokenizer.decode([token_id])
        assert text
        assert set(text) <= set(PRINTABLE)


@settings(deadline=None)
@given(text=st.text(PRINTABLE))
def test_printable_ascii_comes_back_exactly(ascii_tokenizer, text):
    ids = ascii_tokenizer.encode(text, add_special_tokens=False)
    assert ascii_tokenizer.decode(ids) == text


@settings(deadline=None)
@given(text=st.text())
def test_any_text_can_be_encoded_as_ascii(ascii_tokenizer, text):
    text_back = ascii_tokenizer.decode(ascii_tokenizer.encode(text, add_special_tokens=False))
    assert bool(text_back) <= bool(text)
    assert set(text_back) <= set(PRINTABLE)


def test_accents_go_and_other_characters_become_question_marks(ascii_tokenizer):
    ids = ascii_tokenizer.encode("Crème brûlée: 你好 \x07😀\r\n", add_special_tokens=False)
    assert ascii_tokenizer.decode(ids) == "Creme brulee: ?? ???\n"


@settings(deadline=None)
@given(text=st.text())
def test_bytes_bring_any_text_back_exactly(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    assert byte_tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(byte_tokenizer) == VOCABULARY_SIZE


def test_characters_are_split_across_byte_tokens(byte_tokenizer):
    assert len(byte_tokenizer.encode("é好😀", add_special_tokens=False)) == 2 + 3 + 4


def test_special_tokens_have_their_places(ascii_tokenizer):
    assert ascii_tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(NUM_SPECIAL))
    assert set(ascii_tokenizer.all_special_ids) == set(range(NUM_SPECIAL))
    assert ascii_tokenizer.encode("x")[0] == ascii_tokenizer.bos_token_id
    assert ascii_tokenizer.decode(range(NUM_SPECIAL), skip_special_tokens=True) == ""


def test_the_chat_template_takes_strings_and_text_parts(ascii_tokenizer):
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    text = ascii_tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == f"{BEGIN}<|system|>Be brief.{END}<|user|>Good day{END}<|assistant|>{END}"
    prompt = ascii_tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == f"{BEGIN}<|system|>Be brief.{END}<|user|>Good day{END}<|assistant|>"
    ids = ascii_tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    assert ids == ascii_tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, "role must be"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content parts must be"),
    ],
)
def test_the_chat_template_refuses_what_it_cannot_show(ascii_tokenizer, message, complaint):
    with pytest.raises(Exception, match=complaint):
        ascii_tokenizer.apply_chat_template([message], tokenize=False)


def test_the_command_says_one_line(checkpoints, tmp_path):
    command = typer.Typer()
    command.command()(tiny.main)
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--family", "deepseek"])
    assert result.output == f"{tmp_path}: deepseek of seed 0, ascii vocabulary of 512, float32\n"
    assert fingerprint(tmp_path) == fingerprint(checkpoints[Family.DEEPSEEK])


def test_the_command_refuses_a_window_where_there_is_none(tmp_path):
    command = typer.Typer()
    command.command()(tiny.main)
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--family", "llama", "--window", "8"])
    assert result.exit_code == 2
    assert "llama has no window" in result.output
    assert not list(tmp_path.iterdir())
