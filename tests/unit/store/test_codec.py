"""Codecs: unpacked KV is close to the original, and packed KV has the documented size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blending import CHUNKS, laying_out, messages, plain_logits, prepare, relative
from families import FAMILIES, build

from kvrag import (
    BlendEngine,
    DamagedChunkError,
    FileStore,
    FingerprintMismatchError,
    LLMSettings,
    Model,
    ModelError,
    SettingError,
)
from kvrag.cli.main import main
from kvrag.config import CODECS
from kvrag.inspect.gate import verify
from kvrag.store import ChunkRecord, StoreCheck
from kvrag.store.values import pack, unpack

LOSSY = {"int8": 255, "int4": 15}
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Channels and tokens of very different size, none centred on zero."""
    draw = torch.Generator().manual_seed(seed)
    heads, tokens, dim = shape
    size = torch.logspace(-2, 2, dim) * (1 + torch.rand(heads, tokens, 1, generator=draw))
    return ((torch.randn(shape, generator=draw) + 1.5) * size).to(dtype)


def _round_trip(keys: torch.Tensor, values: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    (packed,) = pack([(keys, values)], codec, "a chunk")
    return unpack(packed, codec, CPU)


def _step(tensor: torch.Tensor, codec: str, along: int) -> torch.Tensor:
    """The largest distance of the two codes that an element was rounded between, of its channel or token."""
    low, high = tensor.float().aminmax(dim=along, keepdim=True)
    return (high - low) / LOSSY[codec] * (1 + 2 * torch.finfo(tensor.dtype).eps)


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "key_dim", "value_dim"), [(100, 64, 64), (1, 16, 16), (65, 81, 33), (129, 7, 1)])
def test_no_element_moves_by_more_than_half_a_step(
    codec: str, dtype: torch.dtype, tokens: int, key_dim: int, value_dim: int
) -> None:
    given = _random(3, tokens, key_dim, dtype=dtype), _random(3, tokens, value_dim, dtype=dtype, seed=1)
    for before, after, along in zip(given, _round_trip(*given, codec), (1, 2), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        rounding = before.float().abs() * torch.finfo(dtype).eps  # to the dtype, when it is unpacked
        moved = (after.float() - before.float()).abs()
        assert bool((moved <= _step(before, codec, along) / 2 * 1.01 + rounding).all())


@pytest.mark.parametrize("codec", LOSSY)
def test_keys_are_coded_by_channel_and_values_by_token(codec: str) -> None:
    by_channel = torch.randn(2, 50, 24) * torch.logspace(-3, 3, 24)
    by_token = torch.randn(2, 50, 24) * torch.logspace(-3, 3, 50)[:, None]

    def error(after: torch.Tensor, before: torch.Tensor, along: int) -> float:
        spread = before.std(dim=along, keepdim=True)
        return float(((after - before) / spread).abs().max())

    keys, values = _round_trip(by_channel, by_token, codec)
    other_keys, other_values = _round_trip(by_token, by_channel, codec)
    assert error(keys, by_channel, 1) < 0.5
    assert error(values, by_token, 2) < 0.5
    assert error(other_keys, by_token, 2) > 5
    assert error(other_values, by_channel, 1) > 5


def test_int4_scales_64_elements_at_a_time() -> None:
    keys = torch.randn(1, 128, 4)
    keys[:, :64] *= 1000  # the small ones after them do not suffer
    after, _ = _round_trip(keys, keys, "int4")
    assert float((after - keys)[:, 64:].abs().max()) < 0.5


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_tensors_are_returned_unchanged(codec: str, dtype: torch.dtype) -> None:
    for value in (0.0, -3.5, 6e4, 6e-8):
        same = torch.full((2, 37, 5), value, dtype=dtype)
        for after in _round_trip(same, same, codec):
            assert torch.equal(after, same), value


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_stay_finite(codec: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 4)  # beyond it, float32 has no such range
    ends = torch.tensor([-largest, -1.0, 0.0, 1.0, largest]).to(dtype).repeat(2, 40, 1)
    tiny = (torch.arange(200).view(2, 20, 5) * torch.finfo(dtype).smallest_normal / 100).to(dtype)
    mixed = torch.cat([ends, tiny], dim=1)
    for tensor in (mixed, mixed.transpose(1, 2)):
        for after in _round_trip(tensor, tensor, codec):
            assert bool(after.isfinite().all())
    for after in _round_trip(tiny, tiny, codec):
        assert float((after.float() - tiny.float()).abs().max()) <= torch.finfo(dtype).smallest_normal


def test_native_leaves_everything_as_it_is() -> None:
    keys, values = _random(2, 20, 8), _random(2, 20, 6)
    ((same_keys, same_values),) = pack([(keys, values)], "native", "a chunk")
    assert same_keys is keys
    assert unpack((same_keys, same_values), "native", CPU) == (keys, values)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_bytes_are_found_wherever_they_begin(codec: str) -> None:
    keys = _random(2, 21, 7)
    ((packed, values),) = pack([(keys, keys)], codec, "a chunk")
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])[3:]
    assert torch.equal(unpack((shifted, values), codec, CPU)[0], unpack((packed, values), codec, CPU)[0])


# ---------------------------------------------------------------- size


@pytest.mark.parametrize(("codec", "least"), [("int8", 1.9), ("int4", 3.2)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_sizes_relative_to_bfloat16(codec: str, least: float, head_dim: int, tmp_path: Path) -> None:
    tensor = torch.randn(4, 256, head_dim).bfloat16()
    layers = [(tensor, tensor)] * 6
    packed = pack(layers, codec, "a chunk")
    native = sum(part.nbytes for layer in layers for part in layer)
    assert native / sum(part.nbytes for layer in packed for part in layer) >= least
    store = FileStore(tmp_path, min_free_bytes=0)
    ids = np.arange(256, dtype=np.uint32)
    on_disk = store.put([ChunkRecord("ab" * 16, "", ids, ids[:0], packed)])
    store.close()
    assert native / on_disk >= least * 0.98  # token ids, names, digests


# ---------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(codec: str, bad: float) -> None:
    good, spoilt = _random(2, 20, 8, dtype=torch.float16), _random(2, 20, 8, dtype=torch.float16)
    spoilt[1, 3, 5] = bad
    for layer in ((good, spoilt), (spoilt, good)):
        with pytest.raises(ModelError, match=r"overflows in float16: the KV of chunk 'Once' is not finite on layer 1"):
            pack([(good, good), layer], codec, "Once")


def test_a_chunk_on_which_the_model_overflows_is_named(tokenizer: Any, tmp_path: Path) -> None:
    hf = build("llama")
    with torch.no_grad():
        hf.model.layers[2].self_attn.v_proj.weight.fill_(float("inf"))
    with BlendEngine(Model(hf, tokenizer, "overflowing"), tmp_path) as engine:
        with pytest.raises(ModelError, match=r"chunk 'Mira Brel.*\.\.\.' is not finite on layer 2"):
            engine.warm(CHUNKS[:1])
        assert engine.store.stats().chunks == 0


# ---------------------------------------------------------------- the engine


@pytest.fixture(params=list(LOSSY))
def packing(request: pytest.FixtureRequest, model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine of each lossy codec, with CHUNKS warmed."""
    with BlendEngine(model, FileStore(tmp_path / "packed", min_free_bytes=0), codec=request.param) as engine:
        engine.warm(CHUNKS)
        yield engine


def _prompt(engine: BlendEngine) -> list[int]:
    return engine.model.tokenizer.render(messages(*CHUNKS))


def test_ratio_one_is_full_prefill(packing: BlendEngine, hf: Any) -> None:
    ids = _prompt(packing)
    done = prepare(packing, ids, 1.0, "random")
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    report = done.report
    assert report.recomputed_tokens == report.stored_tokens > report.reused_tokens == 0
    assert report.exact
    answer = packing.generate(messages(*CHUNKS), ratio=1.0, max_new_tokens=8, temperature=0)
    assert answer.token_ids == packing.generate(messages(*CHUNKS), policy="full", max_new_tokens=8).token_ids


def test_plain_reuse_is_close_to_the_native_codecs(packing: BlendEngine, engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    with laying_out(engine) as native, laying_out(packing) as packed:
        reference, ours = native(*CHUNKS), packed(*CHUNKS)
        at = reference.reused.nonzero().squeeze(1)
        for number in range(engine.model.num_layers):
            for theirs, own in zip(reference.cache.layer(number), ours.cache.layer(number), strict=True):
                theirs, own = theirs[:, :, at], own[:, :, at]
                error = float((own - theirs).norm() / theirs.norm())
                assert 0 < error < {"int8": 0.01, "int4": 0.12}[packing.codec]


def test_after_the_preamble_reuse_is_exact_with_the_native_codec_only(
    packing: BlendEngine, engine: BlendEngine, model: Model
) -> None:
    engine.warm(CHUNKS)
    ids = [*model.tokenizer.preamble, *model.tokenizer.encode(CHUNKS[0]), *model.tokenizer.encode(" So it")]
    native, packed = prepare(engine, ids, 0.0, "none"), prepare(packing, ids, 0.0, "none")
    assert native.report.exact
    assert not packed.report.exact
    assert packed.report.recomputed_tokens == 0
    assert len(packed.inexact) == packed.report.stored_tokens == native.report.stored_tokens
    assert prepare(packing, ids, 1.0, "none").report.exact is False  # a policy that selects nothing
    done = prepare(packing, ids, 1.0, "first_k")
    assert done.report.exact
    full = prepare(packing, ids, policy="full")
    assert relative(done.logits[0], full.logits[0]) <= 1e-5


def test_disk_and_ram_hold_the_packed_form_and_give_the_same(packing: BlendEngine, engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    ids = _prompt(packing)
    first, again, native = prepare(packing, ids, 0.2), prepare(packing, ids, 0.2), prepare(engine, ids, 0.2)
    assert (first.report.tier, again.report.tier) == ("disk", "ram")
    assert torch.equal(first.logits, again.logits)
    # of float32; with chunks of some 40 tokens and heads of 16 the scales take their share
    packed_bytes, native_bytes = (one._pipeline.memory._chunks.currsize for one in (packing, engine))
    assert 0 < packed_bytes < 0.4 * native_bytes
    assert first.report.bytes_loaded < 0.4 * native.report.bytes_loaded
    for chunk in packing._pipeline.memory._chunks.values():
        assert {tensor.dtype for layer in chunk.layers.values() for tensor in layer} == {torch.uint8}


def test_it_is_found_again_after_a_restart(packing: BlendEngine, model: Model) -> None:
    ids = _prompt(packing)
    before = prepare(packing, ids, 0.0, "none").logits
    with BlendEngine(model, packing.store.path, codec=packing.codec) as later:  # type: ignore[attr-defined]
        assert later.warm(CHUNKS).new == 0
        assert torch.equal(prepare(later, ids, 0.0, "none").logits, before)


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope", "gemma3", "phi", "gpt_oss"])
def test_other_families(family: str, tokenizer: Any) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    for codec in LOSSY:
        assert all(check.passed for check in verify(partial(BlendEngine, model, codec=codec), 40))


def test_the_gate_compares_stitched_chunks_with_unpacked_ones(model: Model, tokenizer: Any) -> None:
    other = Model(build("qwen2"), tokenizer, "other")

    def open_engine(store: FileStore, codec: str = "int8") -> BlendEngine:
        return BlendEngine(model if codec == "int8" else other, store, codec=codec)

    failed = [check for check in verify(open_engine, 40) if not check.passed]
    assert [check.name for check in failed] == ["plain reuse of int8 chunks = of native ones"]
    assert failed[0].value > 3 * failed[0].limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_models(dtype: torch.dtype, tokenizer: Any, tmp_path: Path) -> None:
    model = Model(build("qwen2").to(dtype), tokenizer, "half")
    for codec in LOSSY:
        with BlendEngine(model, tmp_path / codec, codec=codec) as engine:
            engine.warm(CHUNKS)
            done = prepare(engine, _prompt(engine), 0.0, "none")
            assert done.cache.layer(0)[0].dtype == dtype
            assert bool(done.logits.isfinite().all())


# ---------------------------------------------------------------- whose store it is


def test_the_fingerprint_of_a_model_is_that_of_its_native_store(model: Model, engine: BlendEngine) -> None:
    assert model.fingerprint.codec == "native"
    assert engine.fingerprint == model.fingerprint
    digests = {model.fingerprint.stored_as(codec).digest for codec in CODECS}
    assert len(digests) == 3


@pytest.mark.parametrize(("first", "second"), [("native", "int8"), ("int8", "native"), ("int8", "int4")])
def test_a_store_of_another_codec_is_refused(first: str, second: str, model: Model, tmp_path: Path) -> None:
    BlendEngine(model, tmp_path, codec=first).close()
    with pytest.raises(FingerprintMismatchError, match=f"codec {first} instead of {second}"):
        BlendEngine(model, tmp_path, codec=second)
    BlendEngine(model, tmp_path, codec=first).close()


def test_every_codec_has_a_default_folder_of_its_own(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folders = set()
    for codec in CODECS:
        with BlendEngine(model, codec=codec) as engine:
            folders.add(engine.store.path)  # type: ignore[attr-defined]
    assert len(folders) == 3
    assert tmp_path / ".cache" / "kvrag" / model.fingerprint.digest in folders


def test_an_unknown_codec_is_refused_before_anything_is_loaded(model: Model, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="unknown codec 'int3'; choose one of native, int8, int4"):
        BlendEngine.from_pretrained("no such model", codec="int3")
    with pytest.raises(SettingError, match="int3"):
        BlendEngine(model, tmp_path / "kv", codec="int3")
    assert not (tmp_path / "kv").exists()
    with pytest.raises(SettingError, match="int3"):
        LLMSettings(model="reader", codec="int3")
    with pytest.raises(SettingError, match="leave out codec="):
        LLMSettings(engine=object(), codec="int8")  # type: ignore[arg-type]


# ---------------------------------------------------------------- upkeep


def test_a_damaged_packed_chunk_is_detected_and_deleted(packing: BlendEngine, hf: Any) -> None:
    store: FileStore = packing.store  # type: ignore[assignment]
    path = sorted(store.path.glob("chunks/*/*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-500] ^= 4
    path.write_bytes(content)
    reader = store.open(path.stem.partition("-")[0])
    assert reader is not None
    with pytest.raises(DamagedChunkError):
        [reader.layer(number) for number in range(reader.num_layers)]
    reader.close()
    assert store.check() == StoreCheck(sound=3, damaged=1, unreadable=0)
    ids = _prompt(packing)
    assert relative(prepare(packing, ids, 1.0, "random").logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert packing.warm(CHUNKS).new == 1
    assert store.check() == StoreCheck(sound=4, damaged=0, unreadable=0)


# ---------------------------------------------------------------- command line


def test_warm_and_ask_with_a_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(CHUNKS))
    sizes = {}
    for codec in ("native", "int8"):
        store = ["--store", str(tmp_path / codec)]
        assert main(["warm", str(tmp_path / "a.txt"), "--json", "--codec", codec, *store]) == 0
        sizes[codec] = json.loads(capsys.readouterr().out)["bytes"]
    assert sizes["int8"] < 0.65 * sizes["native"]
    where = ["--store", str(tmp_path / "int8")]
    assert main(["ask", "Who likes curry?", "--codec", "int8", "--max-tokens", "4", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["reused_tokens"] > 0
    assert main(["store", "stats", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["codec"] == "int8"
    assert main(["store", "check", *where]) == 0
    assert main(["ask", "Who likes curry?", *where]) == 1
    assert "codec int8 instead of native" in capsys.readouterr().err


def test_verify_with_a_codec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--chunk-tokens", "40", "--codec", "int4", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["passed"]
    assert [line.split()[0] for line in said.err.splitlines()[-len(found["checks"]) :]] == ["ok"] * len(found["checks"])
