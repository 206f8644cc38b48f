"""Every option is declared once, in `kvrag.config`; what offers it elsewhere is made from that or compared with it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from kvrag import BlendConfig, KvragError, LLMSettings, Sampling, SettingError
from kvrag.cli import ask, explain, serve
from kvrag.cli.common import read_config
from kvrag.cli.main import Parser
from kvrag.client.remote_engine import _checked
from kvrag.config import (
    ANSWER_SETTINGS,
    DECLARED,
    AnswerOptions,
    EngineOptions,
    LoadingOptions,
    ModelOptions,
    checked,
    declared,
)
from kvrag.llm import SETTINGS, AnswerSettings, EngineSettings
from kvrag.llm_fields import LLMFields
from kvrag.server.schemas import ChatRequest

POLICY = "hkvd"
WRONG = ("magic", "query:depth=1")
REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}


def _types(table: type) -> dict[str, str]:
    """Return the types as they are written, without None."""
    written = {name: getattr(kind, "__forward_arg__", kind) for name, kind in inspect.get_annotations(table).items()}
    return {name: str(kind).removesuffix(" | None") for name, kind in written.items()}


def test_options_of_functions_are_checked_and_filled_in() -> None:
    assert checked("f", LoadingOptions, {"learn": True}) == {
        name: row.default for name, row in declared(LoadingOptions).items()
    } | {"learn": True}
    for table, wrong in ((EngineOptions, {"learn": 1}), (ModelOptions, {"learn": True}), (EngineOptions, {"check": 2})):
        with pytest.raises(SettingError):
            checked("f", table, wrong)


def test_the_keywords_of_an_answer_are_the_options_that_are_declared() -> None:
    shown = _types(AnswerOptions)
    assert shown.pop("stop") == "Sequence[str]"
    sampling, blending = _types(Sampling), _types(BlendConfig)
    assert sampling.pop("stop") == "tuple[str, ...]"
    declared = sampling | {name: blending[name] for name in ANSWER_SETTINGS}
    assert {name: shown[name] for name in declared} == declared


@pytest.mark.parametrize("table", [EngineSettings, AnswerSettings])
def test_settings_of_llm_classes_have_the_defaults_that_are_declared(table: type) -> None:
    names = {"max_tokens": "max_new_tokens"}
    for row in fields(table):
        known = DECLARED.get(names.get(row.name, row.name))
        if known is None or row.name == "stop":  # a list, and None
            continue
        assert dict(row.metadata) == dict(known.metadata)
        assert row.default == (None if row.name in ANSWER_SETTINGS else known.default)


def test_an_option_that_is_offered_says_what_it_is_for() -> None:
    assert [name for name, setting in SETTINGS.items() if not setting.metadata["about"]] == []
    schema = ChatRequest.model_json_schema()["properties"]
    for name in (*ANSWER_SETTINGS, "top_k", "min_p", "presence_penalty"):
        assert DECLARED[name].metadata["about"] in str(schema[name]), name


def _parse(module: Any, *words: str) -> argparse.Namespace:
    parser = Parser(prog="kvrag")
    module.add_arguments(parser)
    return parser.parse_args([*(["What?"] if module in (ask, explain) else []), *words])


DOORS: dict[str, Callable[..., Any]] = {
    "engine": lambda **given: BlendConfig(**given),
    "server": lambda **given: ChatRequest.model_validate(REQUEST | given),
    "client": lambda **given: _checked(given),
    "LLM classes": lambda **given: LLMSettings(model="reader", **given),
    "a call of an LLM": lambda **given: LLMSettings(model="reader").request(**given),
    **{
        module.__name__: lambda module=module, **given: _parse(module, *(f"--{key}={given[key]}" for key in given))
        for module in (ask, explain, serve)
    },
}


@pytest.mark.parametrize("door", DOORS)
def test_a_policy_with_settings_and_a_margin_are_accepted_everywhere(door: str) -> None:
    taken = DOORS[door](policy=POLICY, margin=2.5)
    values = taken if isinstance(taken, dict) else {name: getattr(taken, name) for name in ("policy", "margin")}
    assert (values["policy"], values["margin"]) == (POLICY, 2.5)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("given", [{"margin": -1}, *({"policy": wrong} for wrong in WRONG)], ids=str)
def test_a_wrong_one_is_refused_in_one_line_everywhere(
    door: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((KvragError, ValueError, SystemExit)) as refused:
        DOORS[door](**given)
    (name,) = given
    said = capsys.readouterr().err or str(refused.value)
    assert name in said
    if not isinstance(refused.value, ValueError) or isinstance(refused.value, SettingError):  # pydantic's have several
        assert len(said.strip().splitlines()) == 1


def test_serve_passes_all_options_of_blending_on() -> None:
    args = _parse(serve, "--no-corpus", "--margin", "3", "--policy", POLICY, "--edited-history", "blend")
    assert read_config(args) == BlendConfig(POLICY, margin=3.0, edited_history="blend", controller="off")
    assert read_config(_parse(serve, "--no-corpus")) == BlendConfig()


FORMER: dict[str, Callable[[], Any]] = {
    "config": lambda: BlendConfig(history="blend"),
    "change": lambda: replace(BlendConfig(), history="blend"),
    "server": lambda: ChatRequest.model_validate(REQUEST | {"history": "blend"}),
    "LLM classes": lambda: LLMFields.model_validate({"model": "reader", "history": "blend"}),
}


@pytest.mark.parametrize("door", FORMER)
def test_former_names_work_with_a_warning(door: str) -> None:
    with pytest.warns(FutureWarning, match="the option history is now edited_history"):
        assert FORMER[door]().edited_history == "blend"


def test_former_names_of_options_of_calls_work() -> None:
    for take in (DOORS["client"], DOORS["a call of an LLM"]):
        with pytest.warns(FutureWarning, match="history"):
            assert take(history="blend")["edited_history"] == "blend"


def test_sizes_that_serve_offers_are_the_engines() -> None:
    args = _parse(serve)
    sizes = "ram_bytes", "device_bytes", "conversation_bytes", "batch_bytes"
    for name in (*sizes, "learn", "codec", "store_cache"):
        assert getattr(args, name) == DECLARED[name].default, name


def test_a_temperature_that_is_too_small_is_refused_with_its_limits() -> None:
    for wrong in (1e-12, -1, 1e10):
        with pytest.raises(SettingError, match=r"temperature must be a number in \["):
            Sampling(temperature=wrong)
    assert Sampling(temperature=0).temperature == 0.0
