"""Tiny random models in vLLM, on the CPU. The tests need an environment with vLLM and are left out in any other."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from defaults import is_sure, learning, not_by_the_clock, pytest_collection_finish  # noqa: F401
from servers import s3  # noqa: F401

_HERE = Path(__file__).parent

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        """Report skipped tests."""
        terminalreporter.write_line("integrations/vllm-kvrag/tests left out: vllm is not installed here")

else:
    sys.path[:0] = [str(_HERE), str(_HERE.parent)]
    import vllm_environment  # noqa: F401

    # for engines in processes of their own
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_HERE.parents[2]), *sys.path[:2], str(_HERE.parents[2] / "tests" / "helpers")]
    )


@pytest.fixture(scope="session", autouse=True)
def _inspected_here() -> None:
    """Look at an architecture in this process: vLLM starts one for each that is not in its cache, which takes 10 s."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models of all tests."""
    return tmp_path_factory.mktemp("models")
