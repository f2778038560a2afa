"""The engine's options that say how NIXL and the ranks are set up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from transfer.agents.nixl_options import NixlOptions
from transfer.engine.__main__ import main
from transfer.engine.config import EngineSettings

MODEL = Path("model")


def test_nixl_as_it_comes() -> None:
    assert EngineSettings(role="decode", model=MODEL).nixl_options == NixlOptions()


def test_nixl_as_it_is_asked_for() -> None:
    settings = EngineSettings(
        role="decode", model=MODEL, nixl_backends="UCX", nixl_progress_delay_us=1000, nixl_threads=2
    )
    options = settings.nixl_options
    assert (options.backends, options.progress_delay_us) == (("UCX",), 1000)
    assert options.of("UCX") == {"num_threads": "2", "split_batch_size": "16"}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"tensor_parallel_size": 2, "device": "cuda"}, "tensor_parallel_size above 1 needs device cpu"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
    ],
)
def test_ranks_that_cannot_be_started(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineSettings(role="decode", model=MODEL, **wishes)


def test_a_backend_that_is_done_too_early() -> None:
    with pytest.raises(ValidationError, match="'LIBFABRIC' is not used"):
        EngineSettings(role="prefill", model=MODEL, nixl_backends="UCX,LIBFABRIC")


def test_an_engine_without_torch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["engine", "--role", "decode", "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"this Python has no torch; pip install 'pdproxy\[engine\]'"):
        main()


def test_a_mistyped_option_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", "--role", "decode", "--chunksize", "4"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "unrecognized arguments: --chunksize 4 (did you mean --chunk-size" in capsys.readouterr().err


def test_what_is_wrong_names_its_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", "--role", "decod"])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "error: --role: Input should be 'prefill', 'decode' or 'both'",
        "error: --model: Field required",
    ]


def test_help_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", "--role", "decode", "-h"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "--pd-buffer-size SIZE" in capsys.readouterr().out


def test_sizes_have_units() -> None:
    sizes = {"pd_buffer_size": "1GiB", "kv_cache_size": "2GiB", "max_body_bytes": "3MiB"}
    settings = EngineSettings(role="decode", model=MODEL, **sizes)
    assert (settings.pd_buffer_size, settings.kv_cache_size, settings.max_body_bytes) == (1 << 30, 2 << 30, 3 << 20)


def test_the_memory_budget_has_room_for_the_largest_body() -> None:
    assert EngineSettings(role="decode", model=MODEL, memory_budget="80MiB").memory_budget == 80 << 20
    with pytest.raises(ValidationError, match="memory_budget must be at least 76695845 bytes"):
        EngineSettings(role="decode", model=MODEL, memory_budget="64MiB")
