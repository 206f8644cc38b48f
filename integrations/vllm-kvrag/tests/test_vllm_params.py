"""Parameters of requests and settings of the connector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_kvrag import compat
from vllm_kvrag.params import _CHECKS, MODES, ConnectorSettings, RequestParams, read_params
from vllm_kvrag.support import unsupported_caches, unsupported_layers, unsupported_setting

from kvrag import BlendConfig
from kvrag.errors import SettingError

DEFAULT = BlendConfig()


def wish(**given: Any) -> RequestParams:
    return read_params({"kvrag": given}, DEFAULT)


def test_a_request_without_parameters_is_blended_and_has_no_report() -> None:
    for params in (None, {}, {"do_remote_decode": False}):
        assert read_params(params, DEFAULT) == RequestParams(config=DEFAULT)
    assert not read_params(None, DEFAULT).has_params


def test_settings_of_a_request() -> None:
    each = wish(ratio=0.3, policy="hkvd", namespace="team", tag="t", mode="blend")
    assert (each.config.ratio, each.config.policy, each.config.controller) == (0.3, "hkvd", "off")
    assert (each.namespace, each.tag, each.mode, each.ignored) == ("team", "t", "blend", ())
    assert wish(ratio=None, policy=None, controller=None).config == DEFAULT


def test_a_margin_is_refused_as_vllm_decodes(tmp_path: Path) -> None:
    (ignored,) = wish(margin=1.5).ignored
    assert ignored == "margin=1.5 has no effect: vLLM decodes, so the ratio is fixed; leave it out"
    assert wish(margin=None).ignored == ()
    with pytest.raises(SettingError, match=r"margin=1\.5 has no effect"):
        ConnectorSettings.of({"store": str(tmp_path), "margin": 1.5})
    assert ConnectorSettings.of({"store": str(tmp_path)}).config.margin == 0  # not adaptive


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "blendd"},
        {"mode": ["warm"]},
        {"namespace": 3},
        {"namespace": "a\nb"},
        {"ratio": 1.5},
        {"ratio": float("nan")},
        {"ratio": True},
        {"ratio": "0.15"},
        {"policy": "best"},
        {"policy": ["query"]},
        {"controller": {}},
        {"tag": ""},
        {"tag": "x" * 201},
        {"texts": "one string"},
        {"texts": []},
        {"texts": [1]},
        {"contexts": {"a": "text"}},
        {"document": 5},
        {"document": ["a", None]},
        {"document": "\ud800"},
        {"sources": {}},
        {"replace": "no"},
        {"prefix": 1},
        {"raito": 0.1},
        {"": 1},
    ],
)
def test_wrong_parameters_are_ignored_and_named(given: dict[str, Any]) -> None:
    each = wish(**given)
    (message,) = each.ignored
    assert next(iter(given)) in message
    if "mode" in given or "namespace" in given:
        assert each.mode == "off"
    assert each.config == DEFAULT


@pytest.mark.parametrize("given", ["blend", 1, ["mode"], True])
def test_parameters_that_are_not_an_object_switch_blending_off(given: Any) -> None:
    each = read_params({"kvrag": given}, DEFAULT)
    assert each.mode == "off"
    assert each.has_params
    assert each.ignored


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(MODES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted(_CHECKS))


@given(st.dictionaries(NAMES | st.text(), VALUES) | VALUES)
@settings(max_examples=300, deadline=None)
def test_nothing_that_a_client_sends_raises(given: Any) -> None:
    """An exception here would end the engine, for all clients."""
    each = read_params({"kvrag": given}, DEFAULT)
    assert each.mode in MODES
    assert isinstance(each.namespace, str)


def test_the_connectors_settings(tmp_path: Path) -> None:
    extra = {
        "store": str(tmp_path),
        "ratio": 0.2,
        "policy": "first_k",
        "codec": "int8",
        "ram_bytes": 9,
    }
    each = ConnectorSettings.of({**extra, "ram_bytes": 9})
    assert (each.store, each.codec, each.ram_bytes) == (tmp_path, "int8", 9)
    assert (each.config.ratio, each.config.policy) == (0.2, "first_k")


def test_a_url_is_not_a_folder(tmp_path: Path) -> None:
    url = "s3://bucket/place?endpoint=http://here:9000"
    each = ConnectorSettings.of({"store": url, "store_cache": str(tmp_path)})
    assert (each.store, each.store_cache) == (url, str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "store"),
        ({"store": ""}, "store"),
        ({"store": 5}, "store"),
        ({"store": "kv", "raito": 0.1}, "raito"),
        ({"store": "kv", "ratio": 2}, "ratio"),
        ({"store": "kv", "policy": "best"}, "policy"),
        ({"store": "kv", "codec": "fp8"}, "codec"),
        ({"store": "kv", "ram_bytes": -1}, "ram_bytes"),
        ({"store": "kv", "max_bytes": "1G"}, "max_bytes"),
        ({"store": "kv", "rows_per_step": 1.5}, "rows_per_step"),
        ({"store": "kv", "config": {}}, "config"),
        ({"store": "kv", "store_cache": "x"}, "store_cache is the folder of local copies of a shared store"),
        ({"store": "s3://b/x", "store_cache": 1}, "store_cache must be a folder"),
        ({"store": "s3:/b/x"}, "is not a URL"),
        ({"store": "kv", "policy": "query:band=3"}, "unknown policy"),
        ({"store": "kv", "band": [0.2, 0.9]}, "unknown setting 'band'"),
    ],
)
def test_wrong_settings_stop_the_start(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ConnectorSettings.of(extra)


@pytest.mark.parametrize(
    ("found", "is_too_old", "is_untested"),
    [
        ("0.31.0", False, False),
        ("0.32.4", False, False),
        ("0.30.9", True, False),
        ("0.9.2", True, False),
        ("0.33.0+cpu", False, False),
        ("0.34.0", False, True),
        ("0.320.0", False, True),
        ("1.0.0rc1.dev3+gabc", False, True),
        ("dev", False, True),
    ],
)
def test_versions(found: str, is_too_old: bool, is_untested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: found)
    assert bool(compat.too_old()) == is_too_old
    assert bool(compat.untested()) == is_untested


@dataclass
class FullAttentionSpec:
    num_kv_heads: int = 2
    head_size: int = 32


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


def _config(dtype: str = "auto", **changes: Any) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.get("pipeline", 1), decode_context_parallel_size=changes.get("context", 1)
    )
    method = changes.get("speculative")
    return SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype=dtype),
        speculative_config=SimpleNamespace(method=method) if method else None,
        lora_config=changes.get("lora"),
    )


def _layer(number: int, **changes: Any) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU")
    heads = changes.get("heads", 2)
    return SimpleNamespace(layer_name=f"l{number}", num_kv_heads=heads, head_size=32, attn_backend=backend)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(pipeline=2), "pipeline"),
        (_config(context=2), "context parallelism"),
        (_config(speculative="eagle"), "draft model"),
        (_config(lora=object()), "LoRA"),
        (_config("fp8"), "fp8"),
        (_config(speculative="ngram"), ""),
        (_config(), ""),
    ],
)
def test_unsupported_settings(config: Any, message: str) -> None:
    reason = unsupported_setting(config)
    assert message in reason
    assert bool(reason) == bool(message)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([FullAttentionSpec(), FullAttentionSpec()], ""),
        ([FullAttentionSpec(), MambaSpec()], "FullAttention, Mamba"),
        ([FullAttentionSpec(), SlidingWindowSpec()], "FullAttention, SlidingWindow"),
        ([FullAttentionSpec(head_size=64), SlidingWindowSpec()], "layers of different shapes"),
        ([FullAttentionSpec(1), SlidingWindowSpec()], "layers of different shapes"),
        ([SlidingWindowSpec()], "window only"),
        ([], "none"),
    ],
)
def test_unsupported_caches(specs: list[Any], message: str) -> None:
    reason = unsupported_caches({f"l{number}": spec for number, spec in enumerate(specs)})
    assert message in reason
    assert bool(reason) == bool(message)


@pytest.mark.parametrize(
    ("layers", "names", "message"),
    [
        ([_layer(0), _layer(1)], "l0 l1", ""),
        ([], "l0 l1", "not all of its layers"),
        ([_layer(0)], "l0 l1", "not all of its layers"),
        ([_layer(0), _layer(1, heads=4)], "l0 l1", "different shapes"),
    ],
)
def test_unsupported_layers(layers: list[Any], names: str, message: str) -> None:
    reason = unsupported_layers(layers, dict.fromkeys(names.split()))
    assert message in reason
    assert bool(reason) == bool(message)
