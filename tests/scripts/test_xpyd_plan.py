"""What a launch would start, for every kind of engine, and every reason not to start it; no process runs here."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from pdproxy.config.settings import load
from pdproxy.config.values import Engine
from pdproxy.launch import command
from pdproxy.launch.agreement import check_agreement
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.fleet import check, check_buffers, check_command, write_files
from pdproxy.launch.fleet_plan import FleetPlan, plan_fleet
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.kinds.base import EnginePlan
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions, Side
from pdproxy.launch.preflight import (
    Buffer,
    PortUse,
    check_cuda,
    check_memory,
    check_modules,
    check_ports,
    config_of,
    memory_bytes,
)
from tests.helpers.launch_scripts import said_by
from transfer.connectors.vllm.settings import ConnectorSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/1p1d"
MACHINE = Machine(cores=(0, 1, 2, 3), gpus=("0", "1", "2", "3"), environ={})
MODEL = Path("/models/llama")
PYTHON = Path("/venv/bin/python")
SHARED = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "UCX_NET_DEVICES": "lo",
    "NO_PROXY": "localhost,127.0.0.1,::1",
}
ON_CPU = {**SHARED, "UCX_TLS": "tcp,sm,self"}
ALL: list[Engine] = list(KINDS)
VLLM: list[Engine] = ["vllm_nixl", "vllm_transfer", "lmcache", "mooncake"]


def fleet(engine: Engine, **options: Any) -> FleetOptions:
    plain: dict[str, Any] = {"num_prefillers": 2, "num_decoders": 2, "model": MODEL, "python": PYTHON}
    return FleetOptions(engine=engine, **{**plain, **options})


def plan(engine: Engine, machine: Machine = MACHINE, **options: Any) -> FleetPlan:
    return plan_fleet(fleet(engine, **options), machine)


def named(fleet_plan: FleetPlan, name: str) -> EnginePlan:
    return next(engine for engine in fleet_plan.engines if engine.seat.name == name)


def line(engine: EnginePlan) -> str:
    return " ".join(engine.program.command)


def ports(engine: EnginePlan) -> list[int]:
    return [use.port for use in engine.ports]


def instances(fleet_plan: FleetPlan) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads(fleet_plan.files["serve.toml"])["instances"]
    return tables


def fault(engine: Engine, machine: Machine = MACHINE, **options: Any) -> str:
    """The one line with which a launch is refused."""
    with pytest.raises(PreflightError) as caught:
        check_agreement(plan(engine, machine, **options).engines)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestBuiltin:
    def test_the_second_of_each(self) -> None:
        two_by_two = plan("builtin")
        prefiller, decoder = named(two_by_two, "prefill-1"), named(two_by_two, "decode-1")
        assert line(prefiller) == (
            "/venv/bin/python -m transfer.engine --role prefill --port 7101 --model /models/llama "
            "--served-model-name llama --host 127.0.0.1 --device cpu --chunk-size 256"
        )
        assert line(decoder) == (
            "/venv/bin/python -m transfer.engine --role decode --port 7201 --model /models/llama "
            "--served-model-name llama --host 127.0.0.1 --device cpu --receiver-port 7301 --pd-buffer-size 64MiB "
            "--chunk-size 256"
        )
        assert prefiller.program.env == ON_CPU
        assert decoder.program.ready_url == "http://127.0.0.1:7201/health"
        assert (ports(prefiller), ports(decoder)) == ([7101], [7201, 7301])

    def test_by_default_it_is_what_it_always_was(self) -> None:
        alone = plan_fleet(FleetOptions(), MACHINE)
        assert [engine.seat.name for engine in alone.engines] == ["prefill-0", "decode-0"]
        assert [use.port for use in alone.ports] == [9100, 7100, 7200, 7300, 7500]
        assert alone.engines[0].program.command[:3] == (sys.executable, "-m", "transfer.engine")
        assert ".demo/tiny-model" in line(alone.engines[0])

    def test_the_proxy_is_told_of_each(self) -> None:
        two_by_two = plan("builtin", dtype="float32", proxy_args=("--retries", "3"))
        assert " ".join(two_by_two.proxy.command[1:]) == (
            "-m pdproxy serve --config .demo/fleet-9100/serve.toml --drain-grace-s 0 "
            "--model /models/llama --host 127.0.0.1 --port 9100 "
            "--proxy-host 127.0.0.1 --proxy-port 7500 --pd-buffer-size 64MiB --chunk-size 256 --kv-cache-dtype float32 "
            "--retries 3"
        )
        assert two_by_two.proxy.ready_url == "http://127.0.0.1:9100/ready"
        assert instances(two_by_two)[3] == {
            "name": "decode-1",
            "role": "decode",
            "url": "http://127.0.0.1:7201",
            "engine": "builtin",
            "model": "llama",
            "receiver_ports": [7301],
        }

    def test_a_gpu_of_its_own_only_where_asked_for(self) -> None:
        shared = named(plan("builtin", device="cuda:1"), "decode-0")
        assert "--device cuda:1" in line(shared)
        assert "CUDA_VISIBLE_DEVICES" not in shared.program.env
        own = named(plan("builtin", devices=("0", "1", "2", "3")), "decode-0")
        assert "--device cuda " in line(own)
        assert own.program.env == {**SHARED, "CUDA_VISIBLE_DEVICES": "2"}

    def test_what_the_engines_are_given_counts_for_the_proxy_too(self) -> None:
        command = plan("builtin", engine_args=("--chunk-size", "64")).proxy.command
        assert command[command.index("--chunk-size") + 1] == "64"

    def test_the_ranks_of_a_decoder_share_a_receiver(self) -> None:
        halves = plan("builtin", decode=Side(args=("--tensor-parallel-size", "2")))
        decoder = named(halves, "decode-1")
        assert "--receiver-port 7301 " in line(decoder)
        assert ports(decoder) == [7201, 7301]
        assert instances(halves)[3]["receiver_ports"] == [7301]
        assert " --tp-size 2" in " ".join(halves.proxy.command)
        assert named(halves, "prefill-1").buffer is None


class TestVllmNixl:
    def test_the_second_of_each_on_gpus(self) -> None:
        two_by_two = plan("vllm_nixl", engine_args=("--max-model-len", "4096"), decode=Side(args=("--max-num-seqs=9",)))
        prefiller, decoder = named(two_by_two, "prefill-1"), named(two_by_two, "decode-1")
        assert prefiller.program.command == (
            *("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", "/models/llama", "--served-model-name", "llama", "--host", "127.0.0.1", "--port", "7101"),
            *("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'),
            *("--max-model-len", "4096"),
        )
        assert decoder.program.command[-4:] == (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}',
            *("--max-model-len", "4096", "--max-num-seqs=9"),
        )
        assert decoder.program.env == {
            **SHARED,
            "CUDA_VISIBLE_DEVICES": "3",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "5603",
        }
        assert (ports(prefiller), ports(decoder)) == ([7101, 5601], [7201, 5603])
        assert decoder.program.ready_url == "http://127.0.0.1:7201/health"

    def test_without_a_gpu_each_has_cores_and_buffers_of_the_host(self) -> None:
        decoder = named(plan("vllm_nixl", device="cpu", chunk_size=32, dtype="float32"), "decode-1")
        assert line(decoder).endswith(
            '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu"} '
            "--block-size 32 --dtype float32"
        )
        assert decoder.program.env["VLLM_CPU_OMP_THREADS_BIND"] == "3"
        assert decoder.program.env["UCX_TLS"] == "tcp,sm,self"

    @pytest.mark.parametrize(
        ("cores", "args", "bound"),
        [
            (range(8), (), ["0,1", "2,3", "4,5", "6,7"]),
            (range(8), ("-tp", "2"), ["0|1", "2|3", "4|5", "6|7"]),
            (range(2), (), ["0", "1", "0", "1"]),
            (range(4), ("-tp=2",), [None] * 4),
        ],
    )
    def test_cores_are_shared_out(self, cores: range, args: tuple[str, ...], bound: list[str | None]) -> None:
        machine = Machine(cores=tuple(cores), gpus=(), environ={})
        engines = plan("vllm_nixl", machine, device="cpu", engine_args=args).engines
        assert [engine.program.env.get("VLLM_CPU_OMP_THREADS_BIND") for engine in engines] == bound

    def test_the_user_may_bind_them_otherwise(self) -> None:
        machine = Machine(cores=(0, 1), gpus=(), environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "UCX_TLS": "rc"})
        engines = plan("vllm_nixl", machine, device="cpu", decode=Side(env={"UCX_TLS": "tcp"})).engines
        assert not any("VLLM_CPU_OMP_THREADS_BIND" in engine.program.env for engine in engines)
        assert [engine.program.env.get("UCX_TLS") for engine in engines] == [None, None, "tcp", "tcp"]

    def test_data_parallel_ranks_are_instances_with_side_channels_of_their_own(self) -> None:
        two_by_two = plan("vllm_nixl", device="cpu", prefill=Side(args=("--data-parallel-size", "2")))
        assert [ports(engine)[1:] for engine in two_by_two.engines] == [[5600, 5601], [5602, 5603], [5604], [5605]]
        told = [(one["name"], one["url"][-4:], one.get("data_parallel_rank")) for one in instances(two_by_two)]
        assert told == [
            ("prefill-0-rank-0", "7100", 0),
            ("prefill-0-rank-1", "7100", 1),
            ("prefill-1-rank-0", "7101", 0),
            ("prefill-1-rank-1", "7101", 1),
            ("decode-0", "7200", None),
            ("decode-1", "7201", None),
        ]

    def test_the_connector_takes_what_the_user_adds_and_the_proxy_its_lease(self) -> None:
        added = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kv_lease_duration": 60}}
        two_by_two = plan("vllm_nixl", kv_transfer_config=added)
        words = named(two_by_two, "prefill-0").program.command
        given = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert given == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", **added}
        assert two_by_two.proxy.command[-2:] == ("--engine-lease-s", "60")


class TestVllmTransfer:
    def test_decoders_decode_with_whole_cuda_graphs(self) -> None:
        """vLLM asks for none of them where a connector wants to hear of every layer."""
        extras = [
            json.loads(engine.program.command[-1])["kv_connector_extra_config"]
            for engine in plan("vllm_transfer").engines
        ]
        read = [ConnectorSettings.read(extra).layer_by_layer for extra in extras]
        assert read == [True, True, False, False]

    def test_blocks_have_the_same_names_everywhere(self) -> None:
        """vLLM sees to that itself, but for hashes that are safe only while nobody knows their seed."""
        assert all("PYTHONHASHSEED" not in engine.program.env for engine in plan("vllm_transfer").engines)
        xxhash = ("--prefix-caching-hash-algo", "xxhash")
        (seed,) = {engine.program.env["PYTHONHASHSEED"] for engine in plan("vllm_transfer", engine_args=xxhash).engines}
        assert seed.isdecimal()
        machine = replace(MACHINE, environ={"PYTHONHASHSEED": "3"})
        engines = plan("vllm_transfer", machine, engine_args=xxhash).engines
        assert {engine.program.env["PYTHONHASHSEED"] for engine in engines} == {"3"}
        assert "PYTHONHASHSEED is vLLM's own for" in fault("vllm_transfer", decode=Side(env={"PYTHONHASHSEED": "5"}))
        assert "--prefix-caching-hash-algo is" in fault("vllm_transfer", decode=Side(args=xxhash))


class TestLMCache:
    def test_the_second_of_each(self) -> None:
        two_by_two = plan("lmcache", pd_buffer_size="1GiB")
        prefiller, decoder = named(two_by_two, "prefill-1"), named(two_by_two, "decode-1")
        assert prefiller.program.command[-2:] == (
            "--kv-transfer-config",
            '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer", "kv_connector_extra_config": '
            '{"discard_partial_chunks": false, "lmcache_rpc_port": "prefill-1"}}',
        )
        assert decoder.program.env == {
            **SHARED,
            "CUDA_VISIBLE_DEVICES": "3",
            "LMCACHE_CONFIG_FILE": str(Path(".demo/fleet-9100/decode-1.yaml").absolute()),
            "PYTHONHASHSEED": "0",
        }
        assert (ports(prefiller), ports(decoder)) == ([7101], [7201, 7301, 7401])
        assert instances(two_by_two)[3]["alloc_ports"] == [7401]

    def test_each_has_a_file_of_its_own(self) -> None:
        files = plan("lmcache", pd_buffer_size="1GiB").files
        both = {
            "local_cpu": False,
            "max_local_cpu_size": 0,
            "save_unfull_chunk": True,
            "chunk_size": 256,
            "enable_pd": True,
            "transfer_channel": "nixl",
            "pd_buffer_size": 2**30,
            "pd_buffer_device": "cuda",
        }
        assert yaml.safe_load(files["prefill-1.yaml"]) == {
            **both,
            "pd_role": "sender",
            "pd_proxy_host": "127.0.0.1",
            "pd_proxy_port": 7500,
        }
        assert yaml.safe_load(files["decode-1.yaml"]) == {
            **both,
            "pd_role": "receiver",
            "pd_peer_host": "127.0.0.1",
            "pd_peer_init_port": [7301],
            "pd_peer_alloc_port": [7401],
        }

    def test_a_port_for_each_tensor_parallel_rank(self) -> None:
        machine = Machine(cores=(0,), gpus=tuple("01234567"), environ={})
        two_by_two = plan("lmcache", machine, engine_args=("--tensor-parallel-size", "2"))
        decoder = named(two_by_two, "decode-1")
        assert ports(decoder) == [7201, 7302, 7303, 7402, 7403]
        assert yaml.safe_load(two_by_two.files["decode-1.yaml"])["pd_peer_init_port"] == [7302, 7303]
        assert decoder.program.env["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert " ".join(two_by_two.proxy.command).endswith(
            "--first-token auto --pd-buffer-size 2GiB --chunk-size 256 --tp-size 2"
        )

    def test_its_own_configuration_says_what_the_options_leave_open(self) -> None:
        own = {"chunk_size": 64, "pd_buffer_size": 2**20, "nixl_backends": ["UCX"], "pd_role": "both"}
        two_by_two = plan("lmcache", prefill=Side(lmcache=own), decode=Side(lmcache=own))
        written = yaml.safe_load(two_by_two.files["decode-0.yaml"])
        assert (written["nixl_backends"], written["chunk_size"], written["pd_role"]) == (["UCX"], 64, "receiver")
        assert "--pd-buffer-size 1048576 --chunk-size 64" in " ".join(two_by_two.proxy.command)

    @pytest.mark.parametrize(("first_token", "skipped"), [("auto", 1), ("prefiller", 1), ("decoder", None)])
    def test_decoders_look_for_what_the_proxy_has_prefilled(self, first_token: str, skipped: int | None) -> None:
        two_by_two = plan("lmcache", proxy_args=("--first-token", first_token))
        extras = [json.loads(engine.program.command[-1])["kv_connector_extra_config"] for engine in two_by_two.engines]
        assert [extra.get("skip_last_n_tokens") for extra in extras] == [None, None, skipped, skipped]
        otherwise = {"kv_connector_extra_config": {"skip_last_n_tokens": 0 if skipped else 1}}
        message = fault("lmcache", proxy_args=("--first-token", first_token), kv_transfer_config=otherwise)
        assert message.startswith("--kv-transfer-config: skip_last_n_tokens is ")

    def test_chunks_are_not_vllms_blocks(self) -> None:
        assert "--block-size" not in line(named(plan("lmcache", chunk_size=128), "prefill-0"))

    def test_decoders_remember_no_prompts_by_themselves(self) -> None:
        """Else pages stay in their PD buffers."""
        two_by_two = plan("lmcache")
        assert "--no-enable-prefix-caching" in named(two_by_two, "decode-0").program.command
        assert "--no-enable-prefix-caching" not in line(named(two_by_two, "prefill-0"))
        plan("lmcache", prefill=Side(args=("--enable-prefix-caching",)))
        assert "with --prefill-args" in fault("lmcache", engine_args=("--enable-prefix-caching",))

    def test_data_parallel_ranks_have_no_ports_of_their_own(self) -> None:
        ranks = fault("lmcache", num_prefillers=1, num_decoders=1, engine_args=("--data-parallel-size", "2"))
        assert ranks.startswith("--data-parallel-size: LMCache")

    def test_a_hash_seed_of_the_users_is_everybodys(self) -> None:
        machine = Machine(cores=(0,), gpus=MACHINE.gpus, environ={"PYTHONHASHSEED": "7"})
        assert {engine.program.env["PYTHONHASHSEED"] for engine in plan("lmcache", machine).engines} == {"7"}


class TestSglang:
    def test_the_second_of_each(self) -> None:
        two_by_two = plan("sglang", chunk_size=64)
        prefiller, decoder = named(two_by_two, "prefill-1"), named(two_by_two, "decode-1")
        assert line(prefiller) == (
            "/venv/bin/python -m sglang.launch_server --model-path /models/llama --served-model-name llama "
            "--host 127.0.0.1 --port 7101 --device cuda --disaggregation-mode prefill "
            "--disaggregation-bootstrap-port 8999 --dist-init-addr 127.0.0.1:25008 "
            "--disaggregation-transfer-backend nixl --page-size 64"
        )
        assert line(decoder) == (
            "/venv/bin/python -m sglang.launch_server --model-path /models/llama --served-model-name llama "
            "--host 127.0.0.1 --port 7201 --device cuda --disaggregation-mode decode "
            "--dist-init-addr 127.0.0.1:25024 --disaggregation-transfer-backend nixl --page-size 64"
        )
        assert decoder.program.env == {**SHARED, "CUDA_VISIBLE_DEVICES": "3"}
        assert (ports(prefiller), ports(decoder)) == ([7101, 25008, 8999], [7201, 25024])
        assert instances(two_by_two)[1]["bootstrap_port"] == 8999
        assert "bootstrap_port" not in instances(two_by_two)[2]

    def test_data_parallel_attention_divides_ranks_and_takes_more_ports(self) -> None:
        args = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
        machine = Machine(cores=(0,), gpus=tuple("01234567"), environ={})
        two_by_two = plan("sglang", machine, engine_args=args)
        assert ports(named(two_by_two, "decode-0")) == [7200, *range(25016, 25023)]
        assert named(two_by_two, "decode-1").program.env["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert len(instances(two_by_two)) == 8

    def test_modules_follow_the_transfer_backend(self) -> None:
        def modules(*args: str) -> tuple[str, ...]:
            return tuple(KINDS["sglang"].modules(fleet("sglang", engine_args=args)))

        assert modules() == ("sglang", "nixl")
        assert modules("--disaggregation-transfer-backend=mooncake_tcp") == ("sglang", "mooncake")


class TestMooncake:
    def test_the_second_of_each(self) -> None:
        two_by_two = plan("mooncake", device="cpu")
        prefiller, decoder = named(two_by_two, "prefill-1"), named(two_by_two, "decode-1")
        assert prefiller.program.command[-1] == (
            '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu", '
            '"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}'
        )
        own = {"VLLM_CPU_OMP_THREADS_BIND": "1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8999"}
        assert prefiller.program.env == {**ON_CPU, **own}
        assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in decoder.program.env
        assert (ports(prefiller), ports(decoder)) == ([7101, 8999], [7201])
        assert [one.get("bootstrap_port") for one in instances(two_by_two)] == [8998, 8999, None, None]


class TestEveryKind:
    @pytest.mark.parametrize("engine", ALL)
    def test_eight_by_eight_get_along(self, engine: Engine) -> None:
        machine = Machine(cores=(0, 1), gpus=tuple(map(str, range(16))), environ={})
        whole = plan(engine, machine, num_prefillers=8, num_decoders=8)
        assert len(whole.engines) == 16
        assert max(Counter(use.port for use in whole.ports).values()) == 1
        check_agreement(whole.engines)

    @pytest.mark.parametrize("engine", ALL)
    def test_the_proxy_understands_what_it_is_told(
        self, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        whole = plan(engine, engine_args=("--data-parallel-size", "2") if engine == "mooncake" else (), device="cpu")
        write_files(tmp_path / ".demo/fleet-9100", whole.files)
        fleet = load(whole.proxy.command[4:]).fleet()
        assert {instance.engine for instance in fleet} == {engine}
        assert Counter(instance.role for instance in fleet).keys() == {"prefill", "decode"}

    @pytest.mark.parametrize("engine", ALL)
    def test_two_launches_keep_their_files_apart(self, engine: Engine) -> None:
        assert fleet(engine).folder != fleet(engine, port=9200).folder


class TestAgreement:
    @pytest.mark.parametrize(
        ("engine", "args", "what"),
        [
            ("builtin", "--dtype float16", "--dtype is auto for the prefillers and float16 for the decoders"),
            ("builtin", "--chunk-size=64", "--chunk-size is 256 for the prefillers and 64 for the decoders"),
            ("vllm_nixl", "--dtype float16", "--dtype is auto for"),
            ("vllm_nixl", "--block_size 32", "--block-size is the engine's own for the prefillers and 32 for"),
            ("vllm_transfer", "--block-size 32", "--block-size is"),
            ("mooncake", "--block-size 32", "--block-size is"),
            ("mooncake", "--kv-cache-dtype fp8", "--kv-cache-dtype is auto for the prefillers and fp8 for"),
            ("lmcache", "--dtype float16", "--dtype is"),
            ("lmcache", "-tp 2", "--tensor-parallel-size is 1 for the prefillers and 2 for"),
            ("sglang", "--page-size 16", "--page-size is"),
            ("sglang", "--dtype=half", "--dtype is"),
            ("sglang", "--disaggregation-transfer-backend mooncake", "--disaggregation-transfer-backend is nixl for"),
        ],
    )
    def test_options_of_one_side(self, engine: Engine, args: str, what: str) -> None:
        message = fault(engine, device="cpu", decode=Side(args=tuple(args.split())))
        assert message.startswith(f"--prefill-args, --decode-args: {what}")
        assert "must be the same; give it" in message

    @pytest.mark.parametrize("engine", ["builtin", "vllm_nixl", "vllm_transfer", "lmcache", "mooncake", "sglang"])
    def test_the_same_for_both_is_fine(self, engine: Engine) -> None:
        side = Side(args=("--dtype", "float16"))
        check_agreement(plan(engine, dtype="bfloat16", prefill=side, decode=side).engines)
        check_agreement(plan(engine, engine_args=("--dtype", "auto")).engines)

    def test_blocks_of_unlike_sizes_are_fine_where_pages_are_said(self) -> None:
        config = {"kv_connector_extra_config": {"chunk_size": 16}}
        sides = {"prefill": Side(args=("--block-size", "16")), "decode": Side(args=("--block-size", "32"))}
        two_by_two = plan("vllm_transfer", kv_transfer_config=config, **sides)
        check_agreement(two_by_two.engines)
        assert all('"chunk_size": 16' in line(engine) for engine in two_by_two.engines)

    def test_hash_seeds(self) -> None:
        message = fault("lmcache", decode=Side(env={"PYTHONHASHSEED": "5"}))
        assert message.startswith("--prefill-env, --decode-env: PYTHONHASHSEED is 0 for the prefillers and 5 for")
        assert "PYTHONHASHSEED is 'random'" in fault("lmcache", prefill=Side(env={"PYTHONHASHSEED": "random"}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("chunk_size", 128), ("pd_buffer_size", 2**20), ("pre_caching_hash_algorithm", "sha256_cbor")],
    )
    def test_lmcaches_own_configuration(self, name: str, value: object) -> None:
        message = fault("lmcache", prefill=Side(lmcache={name: value}))
        assert message.startswith(f"--prefill-config, --decode-config: {name} is {value} for the prefillers and ")

    def test_lmcaches_own_configuration_against_the_option(self) -> None:
        message = fault("lmcache", chunk_size=256, decode=Side(lmcache={"chunk_size": 128}))
        assert message == "--decode-config: chunk_size is 128 there and 256 in --chunk-size; give only one of them"
        plan("lmcache", pd_buffer_size="1MiB", decode=Side(lmcache={"pd_buffer_size": 2**20}))

    def test_variables_that_lmcache_would_rather_listen_to(self) -> None:
        machine = Machine(cores=(0,), gpus=MACHINE.gpus, environ={"LMCACHE_CHUNK_SIZE": "16"})
        assert fault("lmcache", machine).startswith("LMCACHE_CHUNK_SIZE is set and would beat")
        plan("lmcache", Machine(cores=(0,), gpus=MACHINE.gpus, environ={"LMCACHE_LOG_LEVEL": "DEBUG"}))


class TestRefused:
    @pytest.mark.parametrize(
        ("engine", "args", "message"),
        [
            ("builtin", "--port 1", "--port is for the launcher to give, on both sides alike; choose it with"),
            ("builtin", "--pd-buffer-size=1GiB", "choose it with --pd-buffer-size"),
            ("vllm_nixl", "--model /other", "--model is for the launcher to give"),
            ("vllm_nixl", "--served_model_name x", "choose it with --served-model-name"),
            ("vllm_nixl", "--kv-transfer-config.kv_role kv_both", "the launcher's own --kv-transfer-config"),
            ("lmcache", "--config more.yaml", "give what is in the file in --engine-args"),
            ("sglang", "--model-path /other", "choose it with --model"),
            ("sglang", "--disaggregation-mode null", "it follows from --prefillers and --decoders"),
        ],
    )
    def test_what_is_the_launchers_to_say(self, engine: Engine, args: str, message: str) -> None:
        words = tuple(args.split())
        assert message in fault(engine, engine_args=words)
        for_one = fault(engine, decode=Side(args=words))
        assert for_one.startswith("--decode-args: ")
        assert message in for_one

    @pytest.mark.parametrize("engine", VLLM)
    def test_connectors_are_not_to_be_swapped(self, engine: Engine) -> None:
        message = fault(engine, kv_transfer_config={"kv_role": "kv_both"})
        assert message.startswith("--kv-transfer-config: kv_role follows from --engine and the role")
        assert "is an object" in fault(engine, kv_transfer_config={"kv_connector_extra_config": 3})

    def test_too_few_gpus(self) -> None:
        one = Machine(cores=(0,), gpus=("0",), environ={})
        message = fault("vllm_nixl", one)
        assert message.startswith("--devices: the engines need 4 GPUs and there are 1; ")
        assert "need 8 GPUs" in fault("vllm_nixl", one, engine_args=("-tp", "2"))
        shared = plan("vllm_nixl", one, devices=("0",) * 4)
        assert {engine.program.env["CUDA_VISIBLE_DEVICES"] for engine in shared.engines} == {"0"}

    def test_devices_that_cannot_be(self) -> None:
        assert fault("sglang", device="cuda:1").startswith("--device cuda:1 is neither cpu nor cuda")
        for device in ("gpu", "cuda:x", "CUDA"):
            assert fault("builtin", device=device) == f"--device {device} is neither cpu nor cuda nor cuda:N"
        assert fault("builtin", device="cpu", devices=("0",)).startswith("--devices names GPUs, and --device is cpu")

    def test_an_address_at_which_nobody_is_found(self) -> None:
        message = fault("builtin", host="0.0.0.0")
        assert message.startswith("--host 0.0.0.0 is no address at which engines find one another; ")
        assert plan("builtin", proxy_args=("--host", "0.0.0.0")).proxy.command[-2:] == ("--host", "0.0.0.0")

    def test_a_port_at_which_nobody_looks(self) -> None:
        message = fault("builtin", proxy_args=("--port=7999",), port=9100)
        assert message.startswith(
            "--proxy-args: --port 7999 is not where this launch looks for the proxy, which is port 9100; "
        )
        assert plan("builtin", proxy_args=("--port", "9100"), port=9100).proxy.command[-2:] == ("--port", "9100")

    def test_what_the_proxy_would_not_take(self) -> None:
        message = fault("builtin", proxy_args=("--retrys", "3"))
        assert message.startswith("--proxy-args: ")
        assert "--retrys" in message

    def test_numbers_that_are_none(self) -> None:
        assert (
            fault("vllm_nixl", engine_args=("-tp", "two")) == "--tensor-parallel-size two is not a number of 1 or more"
        )
        assert "--data-parallel-size  is not" in fault("vllm_nixl", engine_args=("--data-parallel-size",))


class TestCheck:
    """The whole of it, on this machine."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "none-such", "dtype": "float32", **config}))
        return tmp_path

    @pytest.mark.parametrize("engine", ["builtin", "lmcache"])
    def test_a_buffer_below_one_page(self, model: Path, engine: Engine) -> None:
        whole = plan(engine, pd_buffer_size="100KiB", chunk_size=256)
        with pytest.raises(PreflightError, match="smaller than one page of 131,072 bytes"):
            check_buffers(whole, config_of(model), MODEL)
        halved = plan(engine, pd_buffer_size="100KiB", chunk_size=256, dtype="float16")
        check_buffers(halved, config_of(model), MODEL)

    def test_a_model_is_needed_where_none_can_be_made(self) -> None:
        with pytest.raises(PreflightError, match="--engine sglang needs a model folder; name one with --model"):
            check(FleetOptions(engine="sglang"))
        with pytest.raises(
            PreflightError, match=r"there is no model folder /nowhere; name one with --model \(in a file: model\)"
        ):
            check(FleetOptions(model=Path("/nowhere")))

    @pytest.mark.parametrize(
        ("engine", "option", "what"),
        [
            ("vllm_nixl", "side_channel_port", "prefill-0's NIXL side channel"),
            ("lmcache", "alloc_port", "decode-0's alloc port"),
            ("sglang", "dist_port", "prefill-0's ranks"),
            ("mooncake", "bootstrap_port", "prefill-0's bootstrap server"),
            ("builtin", "receiver_port", "decode-0's receiver"),
        ],
    )
    def test_every_port_is_looked_at(self, engine: Engine, option: str, what: str) -> None:
        flag = f"--{option.replace('_', '-')}"
        with socket.create_server(("127.0.0.1", 0)) as holder:
            taken = holder.getsockname()[1]
            whole = plan(engine, **{option: taken})
            with pytest.raises(PreflightError, match=rf"port {taken} \({what}\) is taken .* with {flag}$"):
                check_ports("127.0.0.1", [use for use in whole.ports if use.port >= taken])

    def test_ports_that_run_into_one_another(self) -> None:
        whole = plan("vllm_nixl", device="cpu", prefill_port=7199)
        with pytest.raises(
            PreflightError, match=r"--decode-port and --prefill-port are both 7200 \(decode-0 and prefill-1\)"
        ):
            check_ports("127.0.0.1", whole.ports)

    def test_an_address_that_is_not_this_machines(self) -> None:
        with pytest.raises(PreflightError, match=r"cannot listen on 192\.0\.2\.1:9 \(x, --port\): Cannot assign"):
            check_ports("192.0.2.1", [PortUse(9, "x", "--port")])

    def test_a_command_that_is_none(self) -> None:
        check_command([])
        check_command([sys.executable, "nowhere.py"])
        with pytest.raises(
            PreflightError, match="there is no program none-such, which is to be run once all are ready"
        ):
            check_command(["none-such", "-x"])

    def test_a_folder_that_takes_no_files(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(PreflightError, match=r"/file/fleet cannot be written: Not a directory; .* --work-dir"):
            write_files(tmp_path / "file/fleet", {})

    def test_what_the_interpreter_has(self, tmp_path: Path) -> None:
        check_modules(["json", "transfer"], None)
        with pytest.raises(PreflightError, match="this Python has no none_such; pip install 'pdproxy"):
            check_modules(["transfer", "none_such"], None)
        with pytest.raises(PreflightError, match=r"--python .* has no none_such, nor_this; name with --python that of"):
            check_modules(["none_such", "json", "nor_this"], Path(sys.executable))
        with pytest.raises(PreflightError, match=r"--python .*nowhere is no Python that runs"):
            check_modules(["json"], tmp_path / "nowhere")


def started_by(script: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FleetPlan, dict[str, str]]:
    """What an example's script would start, and with which environment."""
    words, environ = said_by(script, ["--decoders", "2", "--engine-args", "--max-model-len 512", "--model", "/m"])
    seen: list[FleetOptions] = []

    async def launch(options: FleetOptions, command: list[str], console: object) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("pdproxy.launch.command.launch", launch)
    result = CliRunner().invoke(command.app, words)
    assert result.exit_code == 0, result.output
    return plan_fleet(seen[0], MACHINE), environ


class TestExamples:
    @pytest.mark.parametrize(
        "script", sorted(EXAMPLES.glob("*/launch*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}"
    )
    def test_every_launch_gets_along(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, _ = started_by(script, monkeypatch)
        check_agreement(whole.engines)
        assert [engine.seat.name for engine in whole.engines] == ["prefill-0", "decode-0", "decode-1"]
        assert "--max-model-len 512" in line(whole.engines[0])
        assert {one["engine"] for one in instances(whole)} == {script.parent.name}

    def test_vllm_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, environ = started_by(EXAMPLES / "vllm_nixl/launch_cpu.sh", monkeypatch)
        assert line(named(whole, "decode-1")).endswith(
            '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu", '
            '"kv_load_failure_policy": "fail"} --block-size 32 --dtype float32 '
            "--enforce-eager --max-num-seqs 8 --max-model-len 512"
        )
        assert environ["VLLM_CPU_KVCACHE_SPACE"] == "1"

    def test_vllm_with_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, environ = started_by(EXAMPLES / "vllm_nixl/launch_gpu.sh", monkeypatch)
        decoder = named(whole, "decode-1")
        assert decoder.program.env["CUDA_VISIBLE_DEVICES"] == "2"
        assert line(decoder).endswith('"kv_load_failure_policy": "fail"} --max-model-len 512')
        assert "VLLM_CPU_KVCACHE_SPACE" not in environ

    @pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/serve.toml")), ids=lambda path: path.parent.name)
    def test_every_file_is_of_its_kind(self, path: Path) -> None:
        fleet = load(["--config", str(path)]).fleet()
        assert {one.engine for one in fleet} == {path.parent.name}


class TestCommandLine:
    def refused(self, *words: str) -> str:
        result = CliRunner().invoke(command.app, list(words), env={"COLUMNS": "300"})
        assert result.exit_code == 1, result.output
        assert result.output.startswith("launch: ")
        assert result.output.count("\n") == 1
        return result.output.removeprefix("launch: ")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--prefill-args '--dtype \"'", "--prefill-args: No closing quotation"),
            ("--decode-env SEED", "--decode-env SEED is not NAME=VALUE"),
            ("--kv-transfer-config {", "--kv-transfer-config is not JSON"),
            ("--kv-transfer-config []", "--kv-transfer-config is not a JSON object"),
            ("--prefill-config x.yaml", "--prefill-config is LMCache's, and --engine is builtin"),
            ("--engine lmcache --decode-config /no.yaml", "--decode-config: /no.yaml cannot be read: "),
            ("--engine mooncake", "--engine mooncake needs a model folder"),
        ],
    )
    def test_what_cannot_be_read(self, words: str, message: str) -> None:
        assert self.refused(*shlex.split(words)).startswith(message)

    def test_no_configuration_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "own.yaml").write_text("- 1\n")
        message = self.refused("--engine", "lmcache", "--prefill-config", str(tmp_path / "own.yaml"))
        assert "is not a mapping of options" in message

    def test_options_reach_the_launch(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen: list[FleetOptions] = []

        async def launch(options: FleetOptions, command: list[str], console: object) -> int:
            seen.append(options)
            return len(command)

        monkeypatch.setattr("pdproxy.launch.command.launch", launch)
        (tmp_path / "own.yaml").write_text("chunk_size: 64\n")
        words = ["--engine", "lmcache", "--prefillers", "3", "--decoders", "8", "--devices", "0, 1", "--model", "/m"]
        words += ["--prefill-args", "--dtype half", "--prefill-args=-tp 2", "--decode-env", "A=b=c"]
        words += ["--decode-config", str(tmp_path / "own.yaml")]
        result = CliRunner().invoke(command.app, [*words, "--once", "--", "true", "--now"])
        assert result.exit_code == 2
        (options,) = seen
        assert (options.engine, options.num_prefillers, options.num_decoders) == ("lmcache", 3, 8)
        assert options.devices == ("0", "1")
        assert options.prefill == Side(args=("--dtype", "half", "-tp", "2"))
        assert options.decode == Side(env={"A": "b=c"}, lmcache={"chunk_size": 64})
        assert options.is_once

    @pytest.mark.parametrize("words", ["--prefillers 0", "--engine none_such", "--chunk-size 0", "--timeout 0"])
    def test_what_is_out_of_range(self, words: str) -> None:
        assert CliRunner().invoke(command.app, words.split()).exit_code == 2


class TestBeforeTorch:
    """What is refused before anything that takes seconds: neither torch nor transformers is imported for it."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ("--device cuda", "launch: --device, --devices (in a file: launch.device, launch.gpus) ask for GPUs: "),
            ("--pd-buffer-size 900TiB", "launch: --pd-buffer-size (in a file: pd_buffer_size): 900TiB is more than"),
            ("--pd-buffer-size 999999TB --decoders 2", "999999TB + 999999TB is more than the "),
            ("--pd-buffer-size 2G", "launch: --pd-buffer-size (in a file: pd_buffer_size): '2G' is not a size"),
            ("--model nowhere", "launch: there is no model folder nowhere; name one with --model"),
        ],
    )
    def test_it_is_refused(
        self,
        options: str,
        says: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        if "cuda" in options and torch.cuda.is_available():
            pytest.skip("there is a GPU")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("pdproxy.launch.fleet.config_of", None)
        monkeypatch.setattr("pdproxy.launch.fleet.check_ports", lambda host, ports: None)
        result = CliRunner().invoke(command.app, shlex.split(options))
        said = result.stderr
        assert result.exit_code == 1
        assert says in said
        assert said.startswith("checking the machine")
        assert not list(tmp_path.iterdir()), "something was started"

    def test_the_check_for_a_gpu_imports_no_torch(self, tmp_path: Path) -> None:
        """It takes the torch that the engines' Python finds, whose version file says enough."""
        for cuda, says in (("None", "its torch 9.9+cpu is built without CUDA"), ("'12.8'", "there is no GPU for its")):
            (tmp_path / "torch").mkdir(exist_ok=True)
            (tmp_path / "torch/__init__.py").write_text("raise SystemExit('imported')")
            (tmp_path / "torch/version.py").write_text(f"__version__ = '9.9+cpu'; cuda = {cuda}; hip = None")
            python = tmp_path / "python"
            python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} CUDA_VISIBLE_DEVICES= exec {sys.executable} "$@"\n')
            python.chmod(0o700)
            with pytest.raises(PreflightError, match=re.escape(says)):
                check_cuda(python)

    def test_memory_is_counted_for_all_ranks(self) -> None:
        buffers = [Buffer(size="1GiB", chunk_size=1, tp_size=2), Buffer(size="2GiB", chunk_size=1)]
        check_memory(buffers, 4 << 30)
        with pytest.raises(PreflightError, match=r"1GiB × 2 \+ 2GiB is more than the 4 GiB of memory"):
            check_memory(buffers, (4 << 30) - 1)
        assert 0 < memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
