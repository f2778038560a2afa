"""Says why nothing else of this folder was run."""

from __future__ import annotations

import os

import pytest

from tests.vllm.engines import PYTHON_VARIABLE

if PYTHON_VARIABLE not in os.environ:
    pytest.skip("real vLLM engines: run scripts/test_vllm", allow_module_level=True)


def test_vllm_is_there() -> None:
    assert os.access(os.environ[PYTHON_VARIABLE], os.X_OK)
