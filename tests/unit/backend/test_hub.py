"""An unknown model is refused at once where the hub cannot be reached; a slow network is given its time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvrag import Model, ModelLoadError
from kvrag.backend.hub import check_model

NAME = "no/body"
UNREACHABLE = "it is not in the local cache, and the hub cannot be reached"


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    proxies = [f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")]
    for name in proxies:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of a server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """An address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_refuses_connections_is_reported_without_retries(
    closed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{closed}")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it would retry"))
    with pytest.raises(ModelLoadError, match=UNREACHABLE):
        Model.from_pretrained(NAME)
    (tmp_path / "models--no--body").mkdir()
    check_model(NAME)  # may be complete


def test_a_hub_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ModelLoadError, match=UNREACHABLE):
        check_model(NAME)


def test_a_slow_network_is_not_refused(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{listening}")
    check_model(NAME)

    def slow(*_: Any, **__: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", slow)
    check_model(NAME)


def test_a_proxy_is_not_judged(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.raises(ModelLoadError, match=UNREACHABLE):
        check_model(NAME)
    monkeypatch.setenv("http_proxy", f"http://{closed}")
    check_model(NAME)


def test_the_switch_for_offline_mode_is_that_of_the_hubs_library(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{closed}")
    for offline, reason in ((True, "HF_HUB_OFFLINE is set"), (False, UNREACHABLE)):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(ModelLoadError, match=reason):
            check_model(NAME)
