"""Request parameters in `kv_transfer_params={"kvrag": {...}}`, and the settings of the connector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvrag import BlendConfig, SettingError
from kvrag.config import check_names, check_namespace, check_number, check_option, renamed
from kvrag.store import is_shared

MODES = ("blend", "warm", "off", "forget", "documents", "report")


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings in `kv_connector_extra_config`.

    Attributes:
        store: Folder of the chunks, or URL of a shared store.
        config: Defaults of all requests.
        codec: Codec of stored chunks; see `BlendEngine`.
        ram_bytes: Size of the RAM tier in front of the store, per worker.
        max_bytes: Byte budget of the store; None = no limit. Of a shared store: of its local copies; None = 64 GiB.
        store_cache: Folder of the local copies of a shared store; None = `~/.cache/kvrag/shared`.
        rows_per_step: Maximum number of rows that a step computes for blending and for vLLM's batch together; None =
            vLLM's `max_num_batched_tokens`.
    """

    store: Path | str
    config: BlendConfig = field(default_factory=BlendConfig)
    codec: str = "native"
    ram_bytes: int = 2 << 30
    max_bytes: int | None = None
    rows_per_step: int | None = None
    store_cache: str | None = None

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Read the settings.

        Raises:
            SettingError: A setting is unknown or out of range, or the store is missing.
        """
        values = renamed(extra)
        name = values.pop("store", None)
        if not isinstance(name, str) or not name:
            raise SettingError('kv_connector_extra_config needs "store": the folder of the chunks, or a URL')
        store = name if is_shared(name) else Path(name).expanduser()
        blend_names = {field.name for field in fields(BlendConfig)}
        blend = {name: values.pop(name) for name in list(values) if name in blend_names}
        connector_names = {field.name for field in fields(cls)} - {"store", "config"}
        if unknown := sorted(set(values) - connector_names):
            known = ", ".join(sorted(connector_names | blend_names | {"store"}))
            raise SettingError(f"unknown setting {unknown[0]!r} in kv_connector_extra_config; choose from {known}")
        if blend.setdefault("margin", 0) != 0:
            _refuse_margin(blend["margin"])
        settings = cls(store, BlendConfig(**blend), **values)
        check_option("codec", settings.codec)
        check_option("ram_bytes", settings.ram_bytes)
        if settings.store_cache is not None:
            if isinstance(store, Path):
                raise SettingError("store_cache is the folder of local copies of a shared store: leave it out")
            if not isinstance(settings.store_cache, str) or not settings.store_cache:
                raise SettingError(f"store_cache must be a folder, got {settings.store_cache!r:.80}")
        for name in ("max_bytes", "rows_per_step"):
            if getattr(settings, name) is not None:
                check_number(name, getattr(settings, name), whole=True)
        return settings


@dataclass(frozen=True)
class RequestParams:
    """Parameters of one request.

    Attributes:
        mode: One of `MODES`.
        has_params: The request had parameters, so its response has a report.
        config: Blend settings.
        namespace: Namespace of the chunks.
        tag: Name under which the report is kept for a later request of mode "report".
        texts, document, sources, skip_invalid: Arguments of `BlendEngine.warm`; `texts` None = the prompt.
        replace: Whether these are all texts of the document.
        contexts: Token ids that precede the texts in their sources, by source, from the report of an earlier task;
            None = the texts begin their sources, and the report contains no contexts.
        prefix: Prefix of the document names to list in mode "documents".
        ignored: Error messages of the parameters that were ignored.
    """

    mode: str = "blend"
    has_params: bool = False
    config: BlendConfig = field(default_factory=BlendConfig)
    namespace: str = ""
    tag: str = ""
    texts: list[str] | None = None
    contexts: dict[str, list[int]] | None = None
    document: str | list[str] = ""
    sources: str | list[str] | None = None
    skip_invalid: bool = False
    replace: bool = True
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def read_params(params: Mapping[str, Any] | None, config: BlendConfig) -> RequestParams:
    """Read a request's `kv_transfer_params`. Invalid parameters are ignored and reported.

    vLLM has no way for a connector to reject a request, so an invalid `mode` or `namespace` turns blending off.
    """
    raw = (params or {}).get("kvrag")
    if raw is None:
        return RequestParams(config=config)
    if not isinstance(raw, dict):
        return RequestParams("off", True, config, ignored=(f"kvrag must be an object, got {raw!r:.80}",))
    ignored: list[str] = []
    values: dict[str, Any] = {}
    for name, value in raw.items():
        check = _CHECKS.get(name)
        try:
            if check is None:
                raise SettingError(f"unknown parameter {name!r:.80}; choose from {', '.join(_CHECKS)}")
            values[name] = check(value)
        except SettingError as error:
            ignored.append(str(error))
            if name in ("mode", "namespace"):
                values["mode"] = "off"
    blend = {name: values.pop(name, None) for name in ("ratio", "margin", "policy", "controller")}
    blend = {name: value for name, value in blend.items() if value is not None}
    if "policy" in blend:
        blend.setdefault("controller", "off")
    return RequestParams(has_params=True, config=replace(config, **blend), ignored=tuple(ignored), **values)


def _checked(name: str, is_valid: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not is_valid(value):
            raise SettingError(f"{name} must be {what}, got {value!r:.80}")
        return value

    return check


def _refuse_margin(margin: Any) -> Any:
    raise SettingError(f"margin={margin!r:.80} has no effect: vLLM decodes, so the ratio is fixed; leave it out")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_contexts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(ids, list) and all(isinstance(token, int) and 0 <= token < 1 << 31 for token in ids)
        for ids in value.values()
    )


def _names(name: str) -> Callable[[Any], Any]:
    check = _checked(name, lambda value: isinstance(value, str) or _is_strings(value), "a name or a list of names")

    def checked(value: Any) -> Any:
        check_names(*(value if isinstance(value, list) else [value]))
        return check(value)

    return checked


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "mode": _checked("mode", lambda value: value in MODES, f"one of {', '.join(MODES)}"),
    **{name: _optional(partial(check_option, name)) for name in ("ratio", "policy", "controller")},
    "margin": _optional(_refuse_margin),
    "namespace": check_namespace,
    "tag": _checked("tag", lambda value: isinstance(value, str) and 0 < len(value) <= 200, "1 to 200 letters"),
    "texts": _checked("texts", lambda value: _is_strings(value) and value, "a list of strings"),
    "contexts": _checked("contexts", _is_contexts, "token ids by source, as an earlier report has them"),
    "document": _names("document"),
    "sources": _optional(_names("sources")),
    **{
        name: _checked(name, lambda value: isinstance(value, bool), "true or false")
        for name in ("skip_invalid", "replace")
    },
    "prefix": _checked("prefix", lambda value: isinstance(value, str), "a string"),
}
