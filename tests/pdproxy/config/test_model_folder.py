"""Models named as on the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdproxy.config.model_folder import model_folder
from pdproxy.config.settings import load

NAME = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the cache has it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct"
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return folder


def test_a_model_that_is_in_the_cache(cached: Path) -> None:
    assert model_folder(Path(NAME)) == cached
    assert load(["--model", NAME]).model == cached


def test_one_that_is_not(cached: Path) -> None:
    assert model_folder(Path("some/other")) == Path("some/other")


def test_a_folder_is_itself(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    for folder in (Path(NAME), tmp_path, Path("/no/such/folder")):
        assert model_folder(folder) == folder


def test_the_hubs_library_is_not_needed_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert model_folder(tmp_path) == tmp_path
