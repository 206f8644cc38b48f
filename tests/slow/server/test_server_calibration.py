"""Calibration over HTTP: progress, stopping, going on, answers meanwhile, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS
from fastapi.testclient import TestClient
from serving import NAME, Served, make_corpus, serving, until

from kvrag import BlendConfig, BlendEngine, Model
from kvrag.control.calibrate import PROMPTS
from kvrag.scheduling import waiting
from kvrag.server.app import create_app
from kvrag.server.calibration import Calibrator
from kvrag.server.settings import ApiKey, ServerSettings

NAMES, TOWNS = ("Mira Brel", "Kan Dror", "Zel Vinford", "Ada Holm"), ("Florton", "Stelburg", "Stinmouth", "Grelville")
TEXTS = [
    f"The baker {name} lives in the old town of {town}. Every day {name} drives a red car to the market of {town}. "
    f"In {town} the friends of {name} play the harp."
    for name, town in itertools.product(NAMES, TOWNS)
]


@pytest.fixture
def served(engine: BlendEngine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


def status(served: Served, method: str = "GET") -> dict[str, Any]:
    found: dict[str, Any] = served.http.request(method, "/v1/calibration").raise_for_status().json()
    assert found.pop("object") == "calibration"
    return found


def test_it_is_stopped_goes_on_and_becomes_the_default(served: Served, engine: BlendEngine) -> None:
    served.http.post("/v1/chunks", json={"texts": TEXTS, "document": "a"}).raise_for_status()
    assert status(served) == {"status": "none", "done": 0, "total": 0, "text": ""}
    assert status(served, "POST")["status"] == "measuring"
    assert status(served, "POST")["status"] == "measuring", "nothing begins twice"
    until(lambda: status(served)["done"] > 12)
    assert served.ask("\n\n".join(TEXTS[:3])).json()["kvrag"]["prompt_tokens"] > 100, "answers continue"
    stopped = status(served, "DELETE")
    assert (stopped["status"], stopped["text"]) == ("unfinished", "stopped: run it again to go on")
    assert stopped["done"] < stopped["total"]
    assert engine.calibration is None

    status(served, "POST")
    until(lambda: status(served)["done"] > 0)
    assert status(served)["done"] >= 12, "what was measured is not measured again"
    until(lambda: status(served)["status"] != "measuring")
    assert engine.calibration is not None
    assert (status(served)["status"], status(served)["text"]) == ("stored", engine.calibration.verdict)
    assert engine.calibration.curve[0].prompts >= PROMPTS
    assert status(served, "DELETE")["status"] == "stored"


def test_errors_are_reported(served: Served, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    response = served.http.post("/v1/calibration", json={"minutes": 3})
    assert response.status_code == 400
    assert "takes no options here" in response.json()["error"]["message"]
    status(served, "POST")
    until(lambda: status(served)["status"] != "measuring")
    failed = status(served)
    assert failed["status"] == "failed"
    assert "warm" in failed["text"]

    def fail(**_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(engine, "calibrate", fail)
    status(served, "POST")
    until(lambda: status(served)["status"] != "measuring")
    assert status(served)["text"] == "internal error: see the server's log"


def test_too_few_documents_are_named(engine: BlendEngine, tmp_path: Path) -> None:
    corpus = make_corpus(engine, tmp_path)
    with serving(engine, corpus) as served:
        served.http.post("/v1/corpus", json={"id": "a", "text": " ".join(CHUNKS)}).raise_for_status()
        until(lambda: served.http.get("/v1/corpus/a").json()["status"] == "ready")
        status(served, "POST")
        until(lambda: status(served)["status"] != "measuring")
        found = status(served)
        assert found["status"] == "failed", "it cannot go on"
        assert f"a default takes {PROMPTS}" in found["text"]


def test_a_result_that_cannot_be_stored_says_so(
    served: Served, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.http.post("/v1/chunks", json={"texts": TEXTS, "document": "a"}).raise_for_status()
    monkeypatch.setattr(type(engine.store), "read_only", True)
    status(served, "POST")
    until(lambda: status(served)["status"] != "measuring")
    assert engine.calibration is not None
    assert status(served)["text"].startswith(f"{engine.calibration.verdict}; valid for this process only: ")


def test_making_prompts_can_be_stopped(engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(engine, tmp_path)
    with serving(engine, corpus) as served:
        served.http.post("/v1/corpus", json={"id": "a", "text": " ".join(CHUNKS)}).raise_for_status()
        until(lambda: served.http.get("/v1/corpus/a").json()["status"] == "ready")

        def measure(search: Callable[[str, int], list[str]], **_: object) -> None:
            while True:
                search("harp", 2)

        monkeypatch.setattr(engine, "calibrate", measure)
        assert status(served, "POST")["status"] == "measuring"
        assert status(served, "DELETE")["status"] == "unfinished"


def test_namespaces_that_share_a_store_may_not_change_each_other(engine: BlendEngine) -> None:
    keys = (ApiKey("one", "a"), ApiKey("two", "b"))
    with serving(engine, key="one", api_keys=keys) as served:
        response = served.http.post("/v1/calibration")
        assert response.status_code == 403
        assert response.json()["error"]["message"] == (
            "this server cannot be calibrated: several namespaces use its store, so run `kvrag calibrate` on that, "
            "and restart the server"
        )
        assert status(served)["status"] == "none"
        assert served.http.get("/samples.json").json()["calibrates"] is False


def test_a_replica_is_not_calibrated_alone(engine: BlendEngine) -> None:
    app = create_app(engine, ServerSettings(name=NAME), is_replica=True)
    client = TestClient(app, "http://127.0.0.1")
    assert "several servers use its store" in client.post("/v1/calibration").json()["error"]["message"]
    assert client.get("/samples.json").json()["calibrates"] is False


@pytest.mark.parametrize("setting", [{"ratio": 0.15}, {"margin": 0.0}, {"policy": "full"}])
def test_a_server_with_a_setting_of_its_own_measures_nothing(
    model: Model, tmp_path: Path, setting: dict[str, Any]
) -> None:
    with BlendEngine(model, tmp_path, BlendConfig(**setting)) as engine, serving(engine) as served:
        response = served.http.post("/v1/calibration")
        assert response.status_code == 403
        assert "start it without --ratio" in response.json()["error"]["message"]
        assert status(served)["status"] == "none"


def test_a_stopped_server_does_not_wait_for_it(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Calibrator] = []
    stop = Calibrator.stop
    monkeypatch.setattr(Calibrator, "stop", lambda self, timeout: (stop(self, timeout), ended.append(self)))

    def measure(**_: object) -> None:
        while True:
            waiting.check_left()

    monkeypatch.setattr(engine, "calibrate", measure)
    with serving(engine) as served:
        assert status(served, "POST")["status"] == "measuring"
    assert [calibrator.status()["status"] for calibrator in ended] == ["unfinished"]
