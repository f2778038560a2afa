"""examples/1p1d/lmcache: its files, and the commands in its README, as far as they can be tried without a GPU."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from pdproxy.config.settings import load
from pdproxy.engines.factory import make_adapter, warn_of_mistakes
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.lmcache_config import read_lmcache_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/1p1d/lmcache"
LLAMA_8B = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "bfloat16"}"""
ANSWERS = {"/health": b"", "/v1/models": b'{"data":[{"id":"llama"}]}', "/metrics": b""}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(LLAMA_8B)
    return str(tmp_path)


def decoders(*arguments: str) -> list[EngineInfo]:
    settings = load(arguments)
    fleet = settings.fleet()
    warn_of_mistakes(fleet, settings)
    return [make_adapter(one, settings).read_facts(ANSWERS) for one in fleet if one.role == "decode"]


def commands() -> list[list[str]]:
    """Of the README, word by word."""
    blocks = "\n".join(block.split("```")[0] for block in (EXAMPLE / "README.md").read_text().split("```sh\n")[1:])
    return [shlex.split(line, comments=True) for line in blocks.replace("\\\n", " ").splitlines() if line]


def test_the_files_belong_together(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (decoder,) = decoders("--config", str(EXAMPLE / "serve.toml"), "--model", model)
    assert (decoder.num_pages, decoder.chunk_size) == (64, 256)
    assert [(one.host, one.port, one.alloc_port) for one in decoder.receivers] == [("127.0.0.1", 7300, 7400)]


def test_a_decoders_file_says_how_many_ranks_share_a_page(model: str, tmp_path: Path) -> None:
    text = (EXAMPLE / "decoder.yaml").read_text().replace("[7300]", "[7300, 7301]").replace("[7400]", "[7400, 7401]")
    (tmp_path / "decoder.yaml").write_text(text)
    (tmp_path / "serve.toml").write_text(
        (EXAMPLE / "serve.toml")
        .read_text()
        .replace("examples/1p1d/lmcache/", f"{tmp_path}/")
        .replace(f"{tmp_path}/prefiller", f"{EXAMPLE}/prefiller")
    )
    (decoder,) = decoders("--config", str(tmp_path / "serve.toml"), "--model", model)
    assert (len(decoder.receivers), decoder.num_pages) == (2, 128)


def test_the_prefiller_knows_where_the_proxy_listens() -> None:
    sender, settings = read_lmcache_config(EXAMPLE / "prefiller.yaml"), load(["--config", str(EXAMPLE / "serve.toml")])
    assert (sender.role, sender.proxy_host, sender.proxy_port) == ("sender", settings.proxy_host, settings.proxy_port)


def test_decoders_are_started_as_the_proxy_is_told() -> None:
    words = [command for command in commands() if "vllm" in command]
    extras = [json.loads(command[command.index("--kv-transfer-config") + 1]) for command in words]
    assert [extra["kv_role"] for extra in extras] == ["kv_producer", "kv_consumer"]
    assert not any("skip_last_n_tokens" in extra["kv_connector_extra_config"] for extra in extras)
    assert load(["--config", str(EXAMPLE / "serve.toml")]).first_token == "decoder"
    assert ["--no-enable-prefix-caching" in command for command in words] == [False, True]
    told = [word for command in words for word in command if word.startswith("LMCACHE_CONFIG_FILE=")]
    files = [word.partition("=")[2] for word in told]
    assert [read_lmcache_config(ROOT / file).role for file in files] == ["sender", "receiver"]


def test_the_reference_proxys_command_in_the_readme(model: str) -> None:
    (serve,) = [command for command in commands() if command[:2] == ["pdproxy", "serve"] and "--config" not in command]
    (decoder,) = decoders(*[model if word == "/models/llama" else word for word in serve[2:]])
    assert decoder.num_pages == 64


def test_scripts_in_the_readme() -> None:
    scripts = {command[0] for command in commands() if command[0].endswith(".sh")}
    assert scripts == {"examples/1p1d/lmcache/launch.sh"}
    for script in scripts:
        subprocess.run(["bash", "-n", ROOT / script], check=True)
