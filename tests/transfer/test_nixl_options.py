"""What a NIXL agent is asked for, and which NIXL will do. Nothing here needs NIXL."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import pytest
import torch

from transfer.agents import nixl_setup
from transfer.agents.nixl_options import NixlOptions
from transfer.agents.nixl_setup import check_version, create_agent
from transfer.errors import TransferError


def test_threads_get_batches_that_they_can_share() -> None:
    assert NixlOptions().of("UCX") == {}
    given = NixlOptions(backend_options={"UCX": {"num_threads": "2"}})
    assert given.of("UCX") == {"num_threads": "2", "split_batch_size": "16"}
    own = NixlOptions(backend_options={"UCX": {"num_threads": "2", "split_batch_size": "64"}})
    assert own.of("UCX")["split_batch_size"] == "64"


@pytest.mark.parametrize(
    "options",
    [
        {"backends": ()},
        {"backends": ("UCX", "UCX")},
        {"backend_options": {"POSIX": {"a": "b"}}},
        {"backends": ("UCX", "POSIX")},
        {"progress_delay_us": 0},
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"NIXL|progress"):
        NixlOptions(**options)


@pytest.mark.parametrize("version", ["1.3", "1.3.0", "1.5.1", "1.10.2", "1.4.0+cu12", "1.6.0rc1"])
def test_releases_in_the_range(version: str) -> None:
    check_version("nixl_cu13", lambda _: version)


@pytest.mark.parametrize("version", ["1.2.9", "0.10.1", "2.0", "2.0.0rc1", "unknown"])
def test_releases_outside_the_range(version: str) -> None:
    with pytest.raises(TransferError, match=rf"nixl-cu13 {version} .*nixl>=1.3,<2"):
        check_version("nixl_cu13", lambda _: version)


def test_the_meta_package_tells_where_the_build_does_not(caplog: pytest.LogCaptureFixture) -> None:
    installed = {"nixl": "1.2"}

    def version_of(distribution: str) -> str:
        try:
            return installed[distribution]
        except KeyError:
            raise metadata.PackageNotFoundError(distribution) from None

    with pytest.raises(TransferError, match=r"nixl 1\.2"):
        check_version("nixl_cu12", version_of)
    installed.clear()
    with caplog.at_level(logging.WARNING):
        check_version("nixl_cu12", version_of)
    assert "version is not known" in caplog.text


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_setup, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(TransferError, match="needs NIXL: pip install"):
        create_agent("e", receives=False, options=NixlOptions(), device=torch.device("cpu"))


def test_a_backend_whose_word_is_not_enough_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'LIBFABRIC' is not used: .* before its bytes are at the peer; name UCX"):
        NixlOptions(backends=("UCX", "LIBFABRIC"))
    with pytest.raises(ValueError, match=r"'CARRIER_PIGEON' is not used: it is not known .*; name UCX"):
        NixlOptions(backends=("CARRIER_PIGEON",))


def test_a_nixl_without_the_backend() -> None:
    class Agent:
        def get_plugin_list(self) -> list[str]:
            return ["POSIX", "OBJ"]

    with pytest.raises(TransferError, match="no backend 'UCX'; it has OBJ, POSIX"):
        nixl_setup._create_backend(Agent(), "UCX", {})


def test_a_binding_without_a_progress_delay_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Bindings:
        class nixlAgentConfig:  # noqa: N801
            pass

    original = Bindings.nixlAgentConfig
    with caplog.at_level(logging.WARNING), nixl_setup._progress_delay(Bindings, 7):
        assert Bindings.nixlAgentConfig is original
    assert "cannot set its progress delay" in caplog.text


def test_the_progress_delay_replaces_what_nixl_sets() -> None:
    class Bindings:
        class nixlAgentConfig:  # noqa: N801
            pthrDelay = 1  # noqa: N815

    original = Bindings.nixlAgentConfig
    with nixl_setup._progress_delay(Bindings, 7):
        config = Bindings.nixlAgentConfig()
        config.pthrDelay = 0
        assert config.pthrDelay == 7
    assert Bindings.nixlAgentConfig is original
