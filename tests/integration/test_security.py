"""Promises of SECURITY.md that no other file tests."""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, messages
from places import Bucket, Faults, Memory, names_in
from records import FINGERPRINT, A, B, held

from kvrag import BlendEngine, FileStore, Model, ModelLoadError, SharedStore, StoreError
from kvrag.cli.serve import add_arguments
from kvrag.store import ChunkRecord
from kvrag.store.log import _unpack, _unpacked

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


def test_evidence_contains_no_text(model: Model, tmp_path: Path) -> None:
    with _engine(model, tmp_path) as engine:
        engine.warm(CHUNKS, document="the handbook", namespace="tenant")
        engine.calibrate([PROMPT] * 2, namespace="tenant")
        engine.generate(PROMPT, namespace="tenant", max_new_tokens=1)
    with closing(FileStore(tmp_path)) as store:
        content = " ".join(store.counts("evidence "))
    assert content
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
    for path in store.glob("chunks/*/*"):
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


def test_credentials_are_in_no_file_and_no_message(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
    store = SharedStore(s3.url.replace("PLACE", tmp_path.name), tmp_path, min_free_bytes=0)
    store.bind(FINGERPRINT)
    store.put([A])
    store.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [path for path in files if b"open-sesame" in path.read_bytes()]
    with closing(Faults(s3)) as faults:
        faults.mode = "403"
        with pytest.raises(StoreError, match=r"access to .* was denied .*: check AWS_ACCESS_KEY_ID") as said:
            SharedStore(faults.url, tmp_path)
    assert "open-sesame" not in str(said.value)


def test_only_the_owner_can_read_local_copies(memory: Memory, tmp_path: Path) -> None:
    store = SharedStore(memory.url.replace("PLACE", tmp_path.name), tmp_path / "copies", min_free_bytes=0)
    store.bind(FINGERPRINT)
    store.put([A])
    (chunk,) = store.path.glob("local/chunks/*/*")
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(chunk.stat().st_mode) == 0o600
    store.close()


def test_gc_erases_the_token_ids_of_a_deleted_text_from_the_place(memory: Memory, tmp_path: Path) -> None:
    store = SharedStore(memory.url.replace("PLACE", tmp_path.name), tmp_path, min_free_bytes=0)
    store.bind(FINGERPRINT)

    def ids(chunk: ChunkRecord) -> bool:
        """Whether the base or a change has a text's token ids."""
        ids = chunk.ids.astype("<u4").tobytes()
        changes = store._remote.read(names_in(store._remote, "changes/"))
        listed = json.dumps([_unpack(content, "change") for content in changes if content])
        bases = [
            _unpacked(content, "base") for content in store._remote.read(names_in(store._remote, "bases/")) if content
        ]
        return any(ids in base for base in bases) or base64.b64encode(ids).decode() in listed

    store.put([A, B])
    store.set_document("doc", held("doc", A, B))
    assert ids(A)
    store._log.compact()
    assert ids(A)
    store.set_document("doc", held("doc", B))
    store.gc()
    assert [ids(chunk) for chunk in (A, B)] == [False, True]
    local = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert [chunk.ids.astype("<u4").tobytes() in local for chunk in (A, B)] == [False, True]
    store.close()
