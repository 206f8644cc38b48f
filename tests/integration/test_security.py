"""Promises of SECURITY.md that no other file tests."""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, messages
from places import Server, free_port
from records import FINGERPRINT, A, B, held

from kvrag import BlendEngine, FileStore, Model, ModelLoadError, SharedStore
from kvrag.cli.serve import add_arguments
from kvrag.store.log import _decode, _unpack

PROMPT = messages(*CHUNKS)


def _engine(model: Model, folder: Path, **settings: Any) -> BlendEngine:
    return BlendEngine(model, FileStore(folder, min_free_bytes=0), conversation_bytes=0, **settings)


def test_chunks_of_another_namespace_save_no_computation(model: Model, tmp_path: Path) -> None:
    rows: list[int] = []
    hook = model.hf.get_input_embeddings().register_forward_hook(lambda _, given, __: rows.append(given[0].numel()))

    def cost(namespace: str) -> int:
        rows.clear()
        engine.generate(PROMPT, namespace=namespace, max_new_tokens=1, ratio=0.1, policy="first_k")
        return sum(rows)

    try:
        with _engine(model, tmp_path) as engine:
            before = cost("two")
            engine.warm(CHUNKS, document="a", namespace="one")
            assert cost("two") == before
            assert cost("one") < before
    finally:
        hook.remove()


def test_calibration_and_speeds_contain_no_text(model: Model, tmp_path: Path) -> None:
    with _engine(model, tmp_path) as engine:
        engine.warm(CHUNKS, document="the handbook", namespace="tenant")
        engine.calibrate([PROMPT] * 2, namespace="tenant")
        engine.generate(PROMPT, namespace="tenant", max_new_tokens=1)
    for name in ("speed.json", "evidence.json"):
        content = (tmp_path / name).read_text()
        assert json.loads(content)
        for secret in ("the handbook", "tenant", "Mira", "Brel", "curry"):
            assert secret not in content


def test_a_pickle_in_a_store_is_not_loaded(model: Model, tmp_path: Path) -> None:
    store, mark = tmp_path / "kv", tmp_path / "mark"
    with _engine(model, store) as engine:
        engine.warm(CHUNKS, document="a")
        full = engine.generate(PROMPT, policy="full", max_new_tokens=4, temperature=0).token_ids

    class Forged:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    forged = pickle.dumps(Forged())
    for path in [*store.glob("chunks/*/*"), store / "speed.json"]:
        path.write_bytes(forged)
    with _engine(model, store) as engine:
        answer = engine.generate(PROMPT, ratio=1.0, policy="first_k", max_new_tokens=4, temperature=0)
    assert answer.token_ids == full
    assert not mark.exists()
    pickle.loads(forged)
    assert mark.exists()


def test_code_of_a_models_authors_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names}))
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(ModelLoadError):
        Model.from_pretrained(str(tmp_path))
    assert not mark.exists()


def test_the_server_listens_on_this_machine_only() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--model", "reader"]).host == "127.0.0.1"


# -------------------------------------------------------------------- shared stores


def test_a_password_is_in_no_file(tmp_path: Path) -> None:
    server = Server(free_port(), ("--requirepass", "open-sesame"))
    server.start()
    try:
        url = server.url.replace("//", "//:open-sesame@")
        store = SharedStore(url, tmp_path, min_free_bytes=0)
        store.bind(FINGERPRINT)
        store.put([A])
        assert "open-sesame" not in store.url
        store.close()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) > 2
        assert not [path for path in files if b"open-sesame" in path.read_bytes()]
        assert not [path for path in files if "open-sesame" in str(path)]
    finally:
        server.stop()


def test_only_the_owner_can_read_local_copies(valkey: Server, tmp_path: Path) -> None:
    store = SharedStore(valkey.url.replace("PLACE", tmp_path.name), tmp_path / "copies", min_free_bytes=0)
    store.bind(FINGERPRINT)
    store.put([A])
    (chunk,) = store.path.glob("local/chunks/*/*")
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(chunk.stat().st_mode) == 0o600
    store.close()


def test_gc_erases_the_token_ids_of_a_deleted_text_from_the_place(valkey: Server, tmp_path: Path) -> None:
    store = SharedStore(valkey.url.replace("PLACE", tmp_path.name), tmp_path, min_free_bytes=0)
    store.bind(FINGERPRINT)

    def texts() -> str:
        """The whole content of the log and the snapshots."""
        names = [*store._remote.names("log/"), *store._remote.names("snapshots/")]
        contents = store._remote.read(names)
        read = [
            _decode(content, name).operation if name.startswith("log/0") else _unpack(content, name)
            for name, content in zip(names, contents, strict=True)
            if content is not None and not name.endswith("trimmed")
        ]
        return json.dumps(read)

    gone, kept = (base64.b64encode(chunk.ids.astype("<u4").tobytes()).decode() for chunk in (A, B))
    store.put([A, B])
    store.set_document("doc", held("doc", A, B))
    assert gone in texts()
    store.set_document("doc", held("doc", B))
    store.gc()
    assert gone not in texts()
    assert kept in texts()
    local = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert [chunk.ids.astype("<u4").tobytes() in local for chunk in (A, B)] == [False, True]
    store.close()
