"""Every example in the README and the docs: run, or checked, or listed with the reason why neither can be done.

`rules` says which command is which, `put_in` what is put into one that is run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import transfer
from pdproxy.config.settings import load
from pdproxy.launch.agreement import check_all_agree
from pdproxy.launch.file_plan import plan_file
from pdproxy.launch.options import RunOptions
from tests.docs import rules
from tests.docs.blocks import ROOT, SHELL, Block, blocks, blocks_of, documents
from tests.docs.check import MACHINE, find_check, options
from tests.docs.put_in import SHORT, PutIn
from tests.e2e.cluster import Cluster, started

PATIENCE_S = 60
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
OUTPUT = frozenset({"text"})
"""Languages of what is shown, and not done."""

ALL = blocks()
LAUNCHED = "launch = true"
"""By it one knows a file of which something is to be started."""
SHELLS = [block for block in ALL if block.language in SHELL]
HOUSES = [block for block in SHELLS if rules.is_house(block.commands)]
"""The README's comes first, and is the one that examples ask."""


def parametrized(some: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", some, ids=str)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an example finds the files that it names, and leaves what it writes."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "fleet.toml").write_text(next(block.text for block in ALL if LAUNCHED in block.text))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the launcher names the one that it makes."""
    return Path(shutil.copytree(tiny_model(), tmp_path_factory.mktemp("docs") / "tiny-model"))


@contextmanager
def running(block: Block, model: Path, folder: Path) -> Iterator[tuple[Cluster, PutIn]]:
    """The processes that a block starts, until a request would be served."""
    put_in = PutIn(model)
    with started(model, folder) as cluster:
        for index, words in enumerate(one for one in block.commands if rules.is_service(one)):
            start(cluster, put_in, index, words)
        asyncio.run(cluster.wait_ready())
        yield cluster, put_in


def start(cluster: Cluster, put_in: PutIn, index: int, words: list[str]) -> None:
    if words[0] == "python":
        done = [*put_in.words(words)[2:], *SHORT]
        role, port = (done[done.index(option) + 1] for option in ("--role", "--port"))
        cluster.start(f"{role}-{index}", role, int(port), done)
        return
    usual = {"--port": "9100", "--proxy-port": "7500"}
    missing = [word for option, number in usual.items() if option not in words for word in (option, number)]
    done = put_in.words([*words, *missing])
    cluster.start("proxy", "proxy", int(done[done.index("--port") + 1]), done)


def run(command: list[str], folder: Path, ends: tuple[int, ...] = (0,), **env: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "NO_PROXY": "127.0.0.1", **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode in ends, result.stdout + result.stderr
    return result.stdout or result.stderr


@pytest.fixture(scope="module")
def house(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PutIn]:
    """What the README starts by hand; examples that ask a proxy ask this one."""
    with running(HOUSES[0], model, tmp_path_factory.mktemp("house")) as (_, put_in):
        yield put_in


# ── shell ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@parametrized(SHELLS)
def test_every_command_is_run_or_checked_or_listed(block: Block) -> None:
    """Those that are run have tests of their own below."""
    for words in block.commands:
        assert "<" not in words, f"{block}: the shell would read a file, for want of quotes: {' '.join(words)}"
        for word in words:
            assert not word.startswith("{") or isinstance(json.loads(word), dict), f"{block}: {word}"
        is_known = rules.reason(words) or rules.is_run(words) or rules.asks(words) or find_check(words)
        assert is_known, f"{block}: nobody here knows how to try this; see tests/docs/rules.py: {rules.told(words)}"


CHECKED = [
    block
    for block in SHELLS
    if any(not (rules.reason(one) or rules.is_run(one) or rules.asks(one)) for one in block.commands)
]


@parametrized(CHECKED)
def test_programs_take_these_options(block: Block, sandbox: Path, model: Path) -> None:
    put_in = PutIn(model)
    for words in block.commands:
        if not (rules.reason(words) or rules.is_run(words) or rules.asks(words)):
            check = find_check([put_in.text(word) for word in words])
            assert check is not None
            check()


@pytest.mark.engine
@parametrized(HOUSES)
def test_houses_serve(block: Block, model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if block is HOUSES[0]:
        request.getfixturevalue("house")
        return
    with running(block, model, tmp_path):
        pass


@parametrized([block for block in SHELLS if any(rules.is_run(one) for one in block.commands)])
def test_commands_that_end_by_themselves(block: Block, sandbox: Path) -> None:
    for words in block.commands:
        if rules.is_run(words):
            printed = run([sys.executable, "-m", *words], sandbox)
            assert printed.strip()
            if "pages" in words:
                assert re.search(r"\b64\b", printed)
                assert "16,384" in printed


@pytest.mark.engine
@parametrized([block for block in SHELLS if any(rules.is_smaller(one) for one in block.commands)])
def test_small_editions(block: Block, sandbox: Path, request: pytest.FixtureRequest) -> None:
    for words in block.commands:
        if rules.is_smaller(words):
            done = rules.smaller(words)
            if any("127.0.0.1" in word for word in done):
                done = request.getfixturevalue("house").words(done)
            assert run([sys.executable, "-m", *done], sandbox, ends=rules.ENDS[words[1]]).strip()


@pytest.mark.engine
@parametrized([block for block in SHELLS if any(rules.asks(one) for one in block.commands)])
def test_questions_to_the_proxy(block: Block, house: PutIn, sandbox: Path) -> None:
    for words in block.commands:
        if rules.asks(words):
            done = house.words(words)
            if words[0] != "curl":
                assert "first token" in run([sys.executable, *done[1:]], sandbox, PDPROXY_URL=proxy_url(house))
            elif shutil.which("curl"):
                answer = json.loads(run(["curl", "-sS", "-f", *done[1:]], sandbox))
                assert answer.get("choices") or answer.get("fleet") or answer == {"status": "ready"}


def proxy_url(house: PutIn) -> str:
    return f"http://127.0.0.1:{house.port('9100')}"


# ── python ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def programs() -> dict[str, str]:
    """Of examples/, by text: they have tests of their own, as tests/transfer/test_public_api.py."""
    return {path.read_text(): path.name for path in (ROOT / "examples").rglob("*.py")}


@pytest.mark.engine
@parametrized([block for block in ALL if block.language == "python" and block.text not in programs()])
def test_python_runs(block: Block, house: PutIn, sandbox: Path) -> None:
    """Names of `transfer` may be used as the text around the example uses them, without an import."""
    text = house.text(block.text)
    known = [name for name in transfer.__all__ if re.search(rf"\b{name}\b", text)]
    prelude = f"from transfer import {', '.join(known)}\n" if known and "import transfer" not in text else ""
    (sandbox / "example.py").write_text(prelude + text)
    run([sys.executable, "example.py"], sandbox)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@parametrized([block for block in ALL if block.language == "toml"])
def test_toml_is_a_fleet(block: Block, model: Path, sandbox: Path) -> None:
    """One that the proxy takes, and the launcher where anything in it is to be started."""
    path = sandbox / "example.toml"
    path.write_text(PutIn(model).text(block.text))
    fleet = load(["--config", str(path)]).expected()
    assert fleet
    if any(one.launch for one in fleet):
        check_all_agree(plan_file(path, RunOptions(), MACHINE).engines)


def test_json_is_json() -> None:
    """One test for all of it, for there may be none."""
    for block in ALL:
        if block.language == "json":
            assert is_json(block.text), block


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


# ── that nothing is left out ────────────────────────────────────────────────────────────────────────────────────────


def test_every_block_is_of_a_language_that_is_tried() -> None:
    tried = SHELL | OUTPUT | {"python", "toml", "json", "diff"}  # a diff is tried by test_adding_an_engine.py
    others = {str(block): block.language for block in ALL if block.language not in tried}
    assert not others, "give each a language, `text` for what is only shown; or try it here"


def test_every_reason_is_the_reason_of_something() -> None:
    lines = {" ".join(words) for block in SHELLS for words in block.commands}
    unused = [pattern for pattern in rules.LISTED if not any(re.fullmatch(pattern, line) for line in lines)]
    assert not unused, "take them out of tests/docs/rules.py"


FOREIGN = {
    "--disaggregation-mode", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port",
    "--enable-pd-role-switch",
    "--max-running-requests", "--page-size", "--tp-size", "--dp-size",
    "--enable-prompt-tokens-details", "--enable-return-routed-experts",
    "--block-size", "--enable-prefix-caching", "--no-enable-prefix-caching", "--max-model-len", "--max-num-seqs",
    "--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size", "--kv-transfer-config",
    "--enforce-eager", "--enable-dbo", "--enable-sleep-mode", "--prefix-caching-hash-algo",
    "--build-arg", "--stop-timeout",
    "--disable-log-stats", "--api-key", "--api-server-count", "--data-parallel-hybrid-lb", "--data-parallel-size-local",
    "--enable-lora", "--lora-modules", "--prompt", "--max-tokens", "--workers", "--deep",
    "--enable-shared", "--enable-optimizations", "--with-lto",
}  # fmt: skip
"""Of SGLang, vLLM, uvicorn, Python's `configure`, and of examples/1p1d/run.sh and scripts/check_kernel."""
INLINE = re.compile(r"`([^`\n]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_the_text_are_options_of_some_program(path: Path) -> None:
    known = options() | FOREIGN | {"--help", "--version"}
    text = path.read_text()
    for block in blocks_of(path):
        text = text.replace(block.text, "")
    named = {flag for code in INLINE.findall(text) for flag in FLAG.findall(code)}
    unknown = named - known
    assert not unknown


class TestTheRules:
    """Each of them can fail."""

    def block(self, text: str, language: str = "bash") -> Block:
        return Block(ROOT / "README.md", 1, language, text)

    def test_words(self) -> None:
        text = "A=1 ./x --y 'a b' \\\n  --z   # why\n\n# nothing\np | q > out && r &\n"
        assert self.block(text).commands == [["./x", "--y", "a b", "--z"], ["p"], ["q"], ["r"]]
        assert self.block("$ x -y\nits output\n", "console").commands == [["x", "-y"]]

    def test_an_option_that_is_none(self) -> None:
        for line in ("pdproxy serve --prefil x", "pdproxy up --prefiller 2", "scripts/soak.py --minute 3"):
            check = find_check(line.split())
            assert check is not None
            with pytest.raises(Exception, match=r"(?i)there is no option|unrecognized|prefil"):
                check()

    @pytest.mark.parametrize(
        "line",
        [
            "pdproxy up --engine vllm_nixl --model DIR --devices 0",
            "scripts/launch_1p1d.sh --engine-args '--role both'",
            "examples/1p1d/sglang/launch.sh --model DIR --decoders 9",
            "pdproxy up nowhere.toml",
        ],
    )
    def test_a_launch_that_would_be_refused(self, line: str) -> None:
        check = find_check(shlex.split(line))
        assert check is not None
        with pytest.raises(AssertionError, match="it is refused"):
            check()

    def test_json_that_is_none(self) -> None:
        assert is_json('{"a": [1]}')
        assert not is_json('{"a": }')

    def test_an_object_that_is_none(self) -> None:
        with pytest.raises(json.JSONDecodeError):
            test_every_command_is_run_or_checked_or_listed(self.block("vllm serve m --x '{\"a\": }'"))

    @pytest.mark.parametrize(
        ("line", "smaller"),
        [
            (
                "loadtest run U --rate 9",
                "loadtest run U --rate 9 --rate 2 --duration 1 --warmup 0 --max-runs 1 "
                "--max-prompt 99 --max-answer 9 --arrivals constant",
            ),
            ("loadtest run U --trace T", "loadtest run U --trace T --requests 2 --max-answer 9"),
            ("loadtest compare a b", "loadtest compare a b"),
            ("simulate knee", "simulate knee --requests 200"),
        ],
    )
    def test_less_to_do(self, line: str, smaller: str) -> None:
        assert rules.smaller(f"pdproxy {line}".split()) == f"pdproxy {smaller}".split()

    def test_a_house_of_its_own(self) -> None:
        words = rules.smaller(["pdproxy", "loadtest", "run", "--cluster", "0:2", "--sweep"])
        assert words[:5] == ["pdproxy", "loadtest", "run", "http://127.0.0.1:9100", "--sweep"]

    def test_programs_that_nobody_knows(self) -> None:
        for line in ("frobnicate --all", "python -m pdproxy.nowhere", "scripts/nowhere.py", "python nowhere.py"):
            assert find_check(line.split()) is None
            assert rules.reason(line.split()) is None

    def test_a_redirection_for_want_of_quotes(self) -> None:
        assert self.block("x --slo 'p99<1'").commands == [["x", "--slo", "p99<1"]]
        with pytest.raises(AssertionError, match="for want of quotes"):
            test_every_command_is_run_or_checked_or_listed(self.block("x --slo p99<1"))

    def test_what_is_put_in(self) -> None:
        put_in = PutIn(Path("/m/tiny"))
        port = put_in.port("7100")
        assert put_in.text("http://127.0.0.1:7100/v1 http://10.0.0.1:7100 DIR /models/llama-3 DIRE") == (
            f"http://127.0.0.1:{port}/v1 http://10.0.0.1:7100 /m/tiny /m/tiny DIRE"
        )
        assert put_in.text('model="DIR\'s last part"') == 'model="tiny"'
        words = put_in.words(["--port", "7100", "--pd-buffer-size", "2GiB", "--max-queue", "7100"])
        assert words == ["--port", str(port), "--pd-buffer-size", "16MiB", "--max-queue", "7100"]

    def test_a_block_that_does_not_end(self, tmp_path: Path) -> None:
        (tmp_path / "a.md").write_text("```bash\nx\n")
        with pytest.raises(AssertionError, match="does not end"):
            list(blocks_of(tmp_path / "a.md"))

    def test_where_blocks_are(self, tmp_path: Path) -> None:
        (tmp_path / "a.md").write_text("# a\n\n```toml\nx = 1\n```\n\n* b\n\n  ```sh\n  y\n    z\n  ```\n")
        found = [(block.line, block.language, block.text) for block in blocks_of(tmp_path / "a.md")]
        assert found == [(3, "toml", "x = 1\n"), (9, "sh", "y\n  z\n")]
