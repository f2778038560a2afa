"""The reference proxy's command lines, word for word as LMCache's examples have them, are ours as well."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pdproxy.config.settings import Settings, load
from pdproxy.engines.factory import make_adapter
from pdproxy.engines.info import EngineInfo

LINES = {
    # examples/disagg_prefill/1p1d/disagg_example_1p1d.sh
    "1p1d": """
        --host localhost \\
        --port 9100 \\
        --prefiller-host localhost \\
        --prefiller-port 7100 \\
        --num-prefillers 1 \\
        --decoder-host localhost \\
        --decoder-port 7200  \\
        --decoder-init-port 7300 \\
        --decoder-alloc-port 7400 \\
        --proxy-host localhost \\
        --proxy-port 7500 \\
        --num-decoders 1 \\
        --model "$MODEL" \\
        --pd-buffer-size "$PD_BUFFER_SIZE" \\
    """,
    # the same before it limited the PD buffer
    "1p1d, earlier": """
        --host localhost \\
        --port 9487 \\
        --prefiller-host localhost \\
        --prefiller-port 7100 \\
        --num-prefillers 1 \\
        --decoder-host localhost \\
        --decoder-port 7200  \\
        --decoder-init-port 7300 \\
        --decoder-alloc-port 7400 \\
        --proxy-host localhost \\
        --proxy-port 7500 \\
        --num-decoders 1 \\
    """,
    # examples/disagg_prefill/xpyd/disagg_example_xpyd.sh
    "xpyd": """
        --host localhost \\
        --port 9100 \\
        --prefiller-host localhost \\
        --prefiller-port 7100 \\
        --num-prefillers 2 \\
        --decoder-host localhost \\
        --decoder-port 7200  \\
        --decoder-init-port 7300 \\
        --decoder-alloc-port 7400 \\
        --proxy-host localhost \\
        --proxy-port 7500 \\
        --num-decoders 2 \\
    """,
    # examples/disagg_prefill/hetero_tp/disagg_example_xpyd.sh
    "two ranks": """
        --host localhost \\
        --port 9487 \\
        --prefiller-host localhost \\
        --prefiller-port 7100 \\
        --num-prefillers 1 \\
        --decoder-host localhost \\
        --decoder-port 7200  \\
        --decoder-init-port 7300,7301 \\
        --decoder-alloc-port 7400,7401 \\
        --proxy-host localhost \\
        --proxy-port 7500 \\
        --num-decoders 1 \\
    """,
    # examples/disagg_prefill/xpyd/README.md, with the ranks of its section on tensor parallelism
    "several hosts": """
    --prefiller-host "${host1-IP},${host2-IP}" \\
    --prefiller-port "8000" \\
    --decoder-host "${host3-IP},${host4-IP}" \\
    --decoder-port "8000,8001" \\
    --decoder-init-port  "7300,7301,7302,7303,7304,7305,7306,7307" \\
    --decoder-alloc-port "7400,7401,7402,7403,7404,7405,7406,7407"
    """,
}
"""What the shell passes on, less redirections."""

LLAMA_8B = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "bfloat16"}"""


def arguments(line: str, **variables: str) -> list[str]:
    for name, value in variables.items():
        line = line.replace(f"${name}", value)
    for number in range(1, 5):
        line = line.replace(f"${{host{number}-IP}}", f"10.0.0.{number}")
    return shlex.split(line.replace("\\\n", " "))


def decoders(settings: Settings) -> list[EngineInfo]:
    """What the adapters of its decoders make of it."""
    answers = {"/health": b"", "/v1/models": b'{"data":[{"id":"m"}]}', "/metrics": b""}
    return [make_adapter(one, settings).read_facts(answers) for one in settings.fleet() if one.role == "decode"]


def ports(facts: EngineInfo) -> list[tuple[int, int | None]]:
    return [(receiver.port, receiver.alloc_port) for receiver in facts.receivers]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(LLAMA_8B)
    return str(tmp_path)


@pytest.mark.parametrize("name", LINES)
def test_every_line_is_taken(name: str, model: str) -> None:
    settings = load(arguments(LINES[name], MODEL=model, PD_BUFFER_SIZE="2147483648"))
    assert {one.engine for one in settings.fleet()} == {"lmcache"}
    assert {(facts.num_pages, facts.chunk_size) for facts in decoders(settings)} == {(64, 256)}


def test_the_line_that_limits_the_buffer(model: str) -> None:
    (decoder,) = decoders(load(arguments(LINES["1p1d"], MODEL=model, PD_BUFFER_SIZE="1073741824")))
    assert (decoder.num_pages, decoder.page_bytes, ports(decoder)) == (32, 32 * 2**20, [(7300, 7400)])


def test_ports_count_up_on_one_host() -> None:
    settings = load(arguments(LINES["xpyd"]))
    assert [(one.name, one.url) for one in settings.fleet()] == [
        ("prefiller-0", "http://localhost:7100"),
        ("prefiller-1", "http://localhost:7101"),
        ("decoder-0", "http://localhost:7200"),
        ("decoder-1", "http://localhost:7201"),
    ]
    assert [ports(facts) for facts in decoders(settings)] == [[(7300, 7400)], [(7301, 7401)]]


def test_ports_repeat_on_hosts_of_their_own() -> None:
    settings = load(arguments(LINES["several hosts"]))
    assert [one.url for one in settings.fleet()] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
        "http://10.0.0.3:8000",
        "http://10.0.0.4:8001",
    ]
    one, other = decoders(settings)
    assert ports(one) == ports(other) == [(7300 + rank, 7400 + rank) for rank in range(8)]
    assert (one.receivers[0].host, other.receivers[0].host) == ("10.0.0.3", "10.0.0.4")


def test_ranks_share_a_decoder() -> None:
    (decoder,) = decoders(load(arguments(LINES["two ranks"])))
    assert ports(decoder) == [(7300, 7400), (7301, 7401)]
