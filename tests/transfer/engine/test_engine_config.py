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
        role="decode", model=MODEL, nixl_backends="UCX", nixl_progress_delay_us=1000, nixl_threads=2
    )
    options = settings.nixl_options
    assert (options.backends, options.progress_delay_us) == (("UCX",), 1000)
    assert options.of("UCX") == {"num_threads": "2", "split_batch_size": "16"}


def test_a_backend_that_is_done_too_early() -> None:
    with pytest.raises(ValidationError, match="'LIBFABRIC' is not used"):
        EngineSettings(role="prefill", model=MODEL, nixl_backends="UCX,LIBFABRIC")
