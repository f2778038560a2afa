"""The engine's options that say how NIXL is set up."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from transfer.agents.nixl_options import NixlOptions
from transfer.engine.config import EngineSettings

MODEL = Path("model")


def test_nixl_as_it_comes() -> None:
    assert EngineSettings(role="decode", model=MODEL).nixl_options == NixlOptions()


def test_nixl_as_it_is_asked_for() -> None:
    settings = EngineSettings(
        role="decode", model=MODEL, nixl_backends="UCX,POSIX", nixl_progress_delay_us=1000, nixl_threads=2
    )
    options = settings.nixl_options
    assert (options.backends, options.progress_delay_us) == (("UCX", "POSIX"), 1000)
    assert options.of("UCX") == {"num_threads": "2", "split_batch_size": "16"}


def test_threads_for_a_backend_that_is_not_used() -> None:
    with pytest.raises(ValidationError, match="options for the NIXL backends"):
        EngineSettings(role="prefill", model=MODEL, nixl_backends="POSIX", nixl_threads=2)
