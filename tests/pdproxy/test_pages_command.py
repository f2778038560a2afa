"""`pdproxy pages`: what a person, a script and a mistaken person get to see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdproxy.cli import app

LLAMA_3_1_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {**LLAMA_3_1_8B, "model_type": "unheard_of"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path, LLAMA_3_1_8B)


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pages(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["pages", *map(str, arguments)])


def test_json(model: Path) -> None:
    result = pages("--model", model, "--pd-buffer-size", "2GiB", "--chunk-size", 256, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "bytes_per_token": 131_072,
        "page_bytes": 33_554_432,
        "pages": 64,
        "max_prompt_tokens": 16_384,
        "groups": [
            {"kind": "full", "num_layers": 32, "bytes_per_token": 131_072, "window": None, "bytes_per_sequence": 0}
        ],
    }


def test_for_a_person(model: Path) -> None:
    result = pages("--model", model / "config.json", "--pd-buffer-size", "2GiB")
    assert result.exit_code == 0
    assert "256 tokens × 131,072 bytes = 33,554,432 bytes (32 MiB)" in result.stdout
    assert "2,147,483,648 bytes (2 GiB) = 64 pages, 0 bytes unused" in result.stdout
    assert "longest prompt that fits: 16,384 tokens" in result.stdout


def test_windows_and_states_are_shown(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "linear_attention"]
    config = {**SMALL, "num_hidden_layers": 3, "layer_types": types, "sliding_window": 4096}
    arguments = ("--model", write(tmp_path, config), "--pd-buffer-size", "1GiB", "--bytes-per-sequence", 5000)
    shown = pages(*arguments).stdout
    assert "window of 4,096 tokens" in shown
    assert "besides, for each sequence: 5,000 bytes (4.883 KiB) of state, in no page" in shown
    groups = json.loads(pages(*arguments, "--json").stdout)["groups"]
    assert [(g["kind"], g["window"], g["bytes_per_sequence"]) for g in groups] == [
        ("full", None, 0),
        ("sliding", 4096, 0),
        ("linear", None, 5000),
    ]


GEMMA = {
    **SMALL,
    "num_hidden_layers": 48,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "sliding_window": 1024,
}
"""4,096 bytes per token and layer: with 256 tokens a chunk of all layers is 48 MiB, one of 8 layers 8 MiB."""


def test_layers_that_are_unlike_are_counted_in_groups_as_well(tmp_path: Path) -> None:
    arguments = ("--model", write(tmp_path, GEMMA), "--pd-buffer-size", "480MiB")
    told = json.loads(pages(*arguments, "--json").stdout)
    assert (told["page_bytes"], told["pages"], told["max_prompt_tokens"]) == (48 << 20, 10, 2560)
    window = {"kind": "sliding", "num_layers": 8, "window": 1024, "state_pages": 0}
    assert told["grouped"] == {
        "page_bytes": 8 << 20,
        "pages": 60,
        "max_prompt_tokens": (60 - 5 * 5) * 256,
        "page_groups": [{"kind": "full", "num_layers": 8, "window": None, "state_pages": 0}, *[window] * 5],
    }
    shown = pages(*arguments).stdout
    assert "one page: 256 tokens of one group = 8,388,608 bytes (8 MiB); the groups:" in shown
    assert "  1 × 8 full layers: every token\n  5 × 8 sliding layers: window of 1,024 tokens\n" in shown
    assert "the buffer: 60 pages\nlongest prompt that fits: 8,960 tokens\n" in shown


def test_where_every_layer_is_windowed_every_prompt_fits(tmp_path: Path) -> None:
    config = {**SMALL, "layer_types": ["sliding_attention"] * 32, "sliding_window": 1024}
    folder = write(tmp_path, config)
    arguments = ("--model", folder, "--pd-buffer-size", "160MiB")
    told = json.loads(pages(*arguments, "--json").stdout)
    assert (told["pages"], told["max_prompt_tokens"]) == (5, 1280)
    assert (told["grouped"]["pages"], told["grouped"]["max_prompt_tokens"]) == (5, None)
    assert "prompts of any length fit" in pages(*arguments).stdout
    less = ("--model", folder, "--pd-buffer-size", "128MiB", "--json")
    assert json.loads(pages(*less).stdout)["grouped"]["max_prompt_tokens"] == 1024


def test_states_take_pages_of_a_group_of_their_own(tmp_path: Path) -> None:
    config = {**SMALL, "num_hidden_layers": 3, "layer_types": ["full_attention", *["linear_attention"] * 2]}
    arguments = ("--model", write(tmp_path, config), "--pd-buffer-size", "4MiB", "--bytes-per-sequence", 1_500_000)
    grouped = json.loads(pages(*arguments, "--json").stdout)["grouped"]
    assert grouped["page_groups"][1] == {"kind": "linear", "num_layers": 2, "window": None, "state_pages": 2}
    assert (grouped["pages"], grouped["max_prompt_tokens"]) == (4, 512)
    assert "1 × 2 linear layers: 2 pages for a whole sequence" in pages(*arguments).stdout


@pytest.mark.parametrize(
    ("options", "num_pages"),
    [
        (["--tp", 2], 128),
        (["--kv-cache-dtype", "fp8"], 128),
        (["--tp", 8, "--kv-cache-dtype", "fp8"], 1024),
        (["--chunk-size", 16], 1024),
        (["--num-kv-heads", 4], 128),
        (["--num-layers", 16], 128),
        (["--head-dim", 64], 128),
        (["--dtype", "float32"], 32),
        (["--bytes-per-token", 65_536], 128),
    ],
)
def test_options(model: Path, options: list[object], num_pages: int) -> None:
    result = pages("--model", model, "--pd-buffer-size", "2GiB", "--json", *options)
    assert json.loads(result.stdout)["pages"] == num_pages


def test_expanded_latent(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"}
    arguments = ("--model", write(tmp_path, config), "--pd-buffer-size", "8GiB", "--json")
    assert json.loads(pages(*arguments).stdout)["bytes_per_token"] == 70_272
    assert json.loads(pages(*arguments, "--cache", "expanded").stdout)["bytes_per_token"] == 61 * 128 * 320 * 2


def test_by_hand_without_a_model() -> None:
    result = pages("--pd-buffer-size", "1MiB", "--bytes-per-token", 1024, "--chunk-size", 256, "--json")
    assert json.loads(result.stdout)["pages"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pd-buffer-size", "2G"], "'2G' is not a size"),
        (["--pd-buffer-size", "1MiB"], "smaller than one page"),
        (["--pd-buffer-size", "2GiB", "--chunk-size", "0"], "chunk_size must be at least 1"),
        (["--pd-buffer-size", "2GiB", "--tp", "3"], "8 KV heads"),
        (["--pd-buffer-size", "2GiB", "--kv-cache-dtype", "fp3"], "unknown dtype 'fp3'"),
        (["--pd-buffer-size", "2GiB", "--cache", "zipped"], "'latent' or 'expanded'"),
        (["--pd-buffer-size", "2GiB", "--model", "/nowhere"], "there is no /nowhere"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(model: Path, options: list[str], words: str) -> None:
    result = pages("--model", model, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("pdproxy: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_nothing_to_count() -> None:
    result = pages("--pd-buffer-size", "2GiB")
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_the_flag_that_an_error_names_is_one_of_ours(tmp_path: Path) -> None:
    folder = write(tmp_path, {name: value for name, value in SMALL.items() if name != "num_key_value_heads"})
    arguments = ("--model", folder, "--pd-buffer-size", "2GiB", "--json")
    assert "num_key_value_heads; give it by hand with --num-kv-heads" in pages(*arguments).stderr
    assert json.loads(pages(*arguments, "--num-kv-heads", 8).stdout)["pages"] == 64


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import atexit, sys, pdproxy.cli; "
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'transfer.geometry'}; "
        "atexit.register(lambda: print({name for name in heavy if sys.modules.get(name)})); "
        "pdproxy.cli.main()"
    )
    run = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("Usage: ")
    assert run.stdout.endswith("\nset()\n")


def test_a_model_type_that_transformers_does_not_know_is_said(tmp_path: Path, model: Path) -> None:
    doubt = "transformers does not know the model type 'unheard_of'"
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", SMALL)
    assert doubt in " ".join(pages("--model", other, "--pd-buffer-size", "2GiB").stdout.split())
    assert json.loads(pages("--model", other, "--pd-buffer-size", "2GiB", "--json").stdout)["warning"].startswith(doubt)
    assert "does not know" not in pages("--model", model, "--pd-buffer-size", "2GiB").stdout


def test_states_are_not_said_to_be_in_the_built_in_engines_pages(tmp_path: Path) -> None:
    hybrid = LLAMA_3_1_8B | {"model_type": "qwen3_next", "head_dim": 256}
    said = " ".join(pages("--model", write(tmp_path, hybrid), "--pd-buffer-size", "2GiB").stdout.split())
    assert "as an engine would have it that pages states, which the built-in engine does not" in said
    windowed = LLAMA_3_1_8B | {"model_type": "mistral", "sliding_window": 512}
    said = " ".join(pages("--model", write(tmp_path, windowed), "--pd-buffer-size", "2GiB").stdout.split())
    assert "as the built-in engine has it" in said
