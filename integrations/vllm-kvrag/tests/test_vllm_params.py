"""Parameters of requests and settings of the connector."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_kvrag import compat
from vllm_kvrag.backend import refuse_unsupported
from vllm_kvrag.params import _CHECKS, MODES, ConnectorSettings, RequestParams, read_params

from kvrag import BlendConfig
from kvrag.errors import SettingError, UnsupportedModelError

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
        "policy": "hkvd",
        "band": [0.2, 0.9],
        "codec": "int8",
        "ram_bytes": 9,
    }
    each = ConnectorSettings.of({**extra, "ram_bytes": 9})
    assert (each.store, each.codec, each.ram_bytes) == (tmp_path, "int8", 9)
    assert (each.config.ratio, each.config.policy, each.config.band) == (0.2, "hkvd", (0.2, 0.9))


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
        ({"store": "kv", "band": 3}, "band"),
        ({"store": "kv", "band": ["a", "b"]}, "band"),
    ],
)
def test_wrong_settings_stop_the_start(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ConnectorSettings.of(extra)


def test_an_unknown_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_version()
    for found in ("0.31.4", "0.320.0", "1.0.0"):
        monkeypatch.setattr(compat, "version", lambda name, found=found: found)
        with pytest.raises(SettingError, match="was tested with"):
            compat.check_version()


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


def _config(dtype: str = "auto", **changes: Any) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.get("pipeline", 1), decode_context_parallel_size=changes.get("context", 1)
    )
    return SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype=dtype),
        speculative_config=changes.get("speculative"),
        lora_config=changes.get("lora"),
    )


def _layer(number: int, **changes: Any) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU")
    impl = SimpleNamespace(sinks=changes.get("sinks"))
    heads = changes.get("heads", 2)
    return SimpleNamespace(layer_name=f"l{number}", num_kv_heads=heads, head_size=32, attn_backend=backend, impl=impl)


def _groups(*specs: Any, names: tuple[str, ...] = ("l0", "l1")) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s, layer_names=list(names)) for s in specs])


@pytest.mark.parametrize(
    ("config", "groups", "layers", "message"),
    [
        (_config(pipeline=2), None, None, "pipeline"),
        (_config(context=2), None, None, "context parallelism"),
        (_config(speculative=object()), None, None, "speculative"),
        (_config(lora=object()), None, None, "LoRA"),
        (_config("fp8"), None, None, "fp8"),
        (_config(), _groups(FullAttentionSpec(), FullAttentionSpec()), None, "several kinds"),
        (_config(), None, [], "ordinary attention"),
        (_config(), _groups(SlidingWindowSpec()), None, "window only"),
        (_config(), _groups(FullAttentionSpec(), names=("l0",)), None, "not all of its layers"),
        (_config(), None, [_layer(0), _layer(1, heads=4)], "different shapes"),
        (_config(), None, [_layer(0), _layer(1, sinks=object())], "sinks"),
    ],
)
def test_unsupported_models_are_refused(config: Any, groups: Any, layers: Any, message: str) -> None:
    layers = [_layer(0), _layer(1)] if layers is None else layers
    with pytest.raises(UnsupportedModelError, match=message):
        refuse_unsupported(config, groups or _groups(FullAttentionSpec()), layers)


def test_only_layers_of_different_shapes_are_refused() -> None:
    groups = _groups(FullAttentionSpec())
    refuse_unsupported(_config(), groups, layers := [_layer(0), _layer(1)])
    layers[1].num_kv_heads += 1
    with pytest.raises(UnsupportedModelError):
        refuse_unsupported(_config(), groups, layers)
