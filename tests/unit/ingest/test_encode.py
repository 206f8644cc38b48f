"""Ingestion: chunks encoded together have the same KV as chunks encoded alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, build

from kvrag import Model
from kvrag.ingest.encode import Tree, _batches, encode, trees

CHUNKS = [
    [5 + i * 7 % 900 for i in range(start, start + length)] for start, length in enumerate([3, 90, 17, 1, 64, 90, 40])
]


@pytest.mark.parametrize(
    ("family", "batch_tokens"),
    [
        *(("llama", batch_tokens) for batch_tokens in (1, 200, 100_000)),
        *((family, 200) for family in ("mistral-window", "llama-dynamic", "phi3-longrope", "gemma3", "qwen3_moe")),
    ],
)
def test_batched_equals_alone(family: str, batch_tokens: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    for name in ("BATCH_TOKENS", "CPU_TOKENS"):
        monkeypatch.setattr(f"kvrag.ingest.encode.{name}", batch_tokens)
    together = dict(encode(model, CHUNKS))
    assert sorted(together) == list(range(len(CHUNKS)))
    for number, chunk in enumerate(CHUNKS):
        alone = dict(encode(model, [chunk]))[0]
        for ours, theirs in zip(together[number], alone, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == (2, len(chunk), 16)
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_preamble_is_seen_and_dropped(model: Model, hf: Any) -> None:
    chunk = list(range(100, 140))
    preamble = list(model.tokenizer.preamble)
    assert preamble
    cache = model.new_cache(100)
    model.forward(torch.tensor([[*preamble, *chunk]]), cache)
    rotations = model.rotations(torch.arange(len(preamble), len(preamble) + 40))
    own = dict(encode(model, [chunk]))[0]
    for number, (keys, values) in enumerate(own):
        own_keys, own_values = (tensor[:, :, len(preamble) : len(preamble) + 40] for tensor in cache.layer(number))
        torch.testing.assert_close(values, own_values[0], atol=1e-5, rtol=1e-5)
        turned = keys[None].clone()
        rotations[number].rotate(turned)
        torch.testing.assert_close(turned, own_keys, atol=1e-5, rtol=1e-5)
    without = model.new_cache(100)
    model.forward(torch.tensor([chunk]), without)
    assert not torch.allclose(without.layer(1)[1][0, :, :40], own[1][1], atol=1e-2)


def _lengths(lengths: list[int], most_tokens: int, stable_length: int) -> list[list[int]]:
    """Return the lengths of the rows in each batch."""
    batches = _batches([Tree([0] * length) for length in lengths], most_tokens, stable_length)
    return [[len(tree.ids) for tree in batch] for batch in batches]


def test_batches_hold_every_chunk_once_and_keep_their_bound() -> None:
    lengths = [(i * 37) % 200 + 6 for i in range(100)]
    batches = _lengths(lengths, 1000, 10**9)
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    assert all(len(batch) == 1 or max(batch) * len(batch) <= 1000 for batch in batches)
    assert len(batches) < 20
    assert _lengths([], 1000, 10) == []


def test_where_rope_follows_the_length_only_equal_lengths_share_a_batch() -> None:
    assert _lengths([14, 24, 99, 100, 100, 101, 34], 10**6, 100) == [[14, 24, 34, 99, 100, 100], [101]]
    assert _lengths([204, 205, 204, 205], 10**6, 100) == [[204, 204], [205, 205]]


def test_keys_are_position_free(model: Model) -> None:
    """Layer 0 depends on the token alone: the same token has the same key at every position."""
    keys, values = dict(encode(model, [[7] * 30]))[0][0]
    torch.testing.assert_close(keys, keys[:, :1].expand_as(keys), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, values[:, :1].expand_as(values), atol=1e-5, rtol=1e-5)


def test_the_context_of_a_chunk_is_attended_to_and_dropped(model: Model) -> None:
    """Its KV equals that of one pass over both, at any position."""
    context, chunk = CHUNKS[1], CHUNKS[5]
    whole = dict(encode(model, [context + chunk]))[0]
    own = dict(encode(model, [chunk, chunk], [context, []]))
    for (keys, values), (all_keys, all_values), (alone_keys, _) in zip(own[0], whole, own[1], strict=True):
        assert keys.shape == values.shape == alone_keys.shape
        torch.testing.assert_close(keys, all_keys[:, len(context) :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, all_values[:, len(context) :], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(own[0][1][0], own[1][1][0], atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "llama-dynamic", "phi3-longrope", "gemma3", "qwen3_moe"])
def test_common_contexts_are_computed_once(family: str, tokenizer: Any) -> None:
    """The KV equals that of each context encoded alone."""
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    first, second, third, other = CHUNKS[1][:20], CHUNKS[2], CHUNKS[5][:15], CHUNKS[4][:30]
    chunks = [third, first, other, second, first]
    contexts = [[*first, 3, *second, 3], [], [], [*first, 3], []]
    preamble = len(model.tokenizer.preamble)
    assert sorted(tree.num_tokens for tree in trees(model, chunks, contexts)) == [
        preamble + 30,
        preamble + 20 + 17 + 15 + 2,
    ]
    together = dict(encode(model, chunks, contexts))
    assert sorted(together) == list(range(5))
    for number, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
        ((_, alone),) = encode(model, [chunk], [context])
        for ours, theirs in zip(together[number], alone, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == (2, len(chunk), 16)
                assert a.untyped_storage().nbytes() == a.nbytes, "nothing else is kept in memory with it"
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def overlapping(length: int = 40, repeated: int = 12, number: int = 5) -> tuple[list[list[int]], list[list[int]]]:
    """Return chunks and contexts like those of a splitter with overlap and a byte-level BPE.

    A chunk's first token is not the document's, because the space before it is missing.
    """
    step = length - repeated
    document = [5 + i * 7 % 900 for i in range(length + step * (number - 1))]
    chunks = [document[i * step : i * step + length] for i in range(number)]
    chunks[1:] = [[901 + i, *chunk[1:]] for i, chunk in enumerate(chunks[1:])]
    contexts: list[list[int]] = [[]]
    for chunk in chunks[:-1]:
        contexts.append(contexts[-1] + chunk[:step])
    return chunks, contexts


BRANCHING = [
    "llama",
    "mistral-window",
    "llama-dynamic",
    "phi3-longrope",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "glm",
]


@pytest.fixture
def computed(hf: Any) -> Iterator[list[int]]:
    """Numbers of tokens of all forward passes, padding included."""
    seen: list[int] = []
    hook = hf.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    yield seen
    hook.remove()


@pytest.mark.parametrize("family", BRANCHING)
@pytest.mark.parametrize("most_tokens", [4096, 150, 1])
def test_overlapping_chunks_have_the_kv_of_separate_passes(
    family: str, most_tokens: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.ingest.encode.BATCH_TOKENS", most_tokens)
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    chunks, contexts = overlapping()
    order = [3, 0, 4, 1, 2]
    chunks, contexts = [chunks[i] for i in order], [contexts[i] for i in order]
    together = dict(encode(model, chunks, contexts))
    assert sorted(together) == list(range(5))
    for number, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
        cache = model.new_cache(500)
        row = [*model.preamble, *context, *chunk]
        model.forward(torch.tensor([row]), cache)
        rotations = model.rotations(torch.arange(len(row)))
        for layer, (keys, values) in enumerate(together[number]):
            own_keys, own_values = (part[:, :, : len(row)] for part in cache.layer(layer))
            own = slice(len(row) - len(chunk), len(row))
            torch.testing.assert_close(values, own_values[0, :, own], atol=1e-4, rtol=1e-4)
            free = rotations[layer].unrotate(own_keys)
            torch.testing.assert_close(keys, free[0, :, own], atol=1e-4, rtol=1e-4)


def test_text_that_chunks_repeat_is_computed_once(model: Model, computed: list[int]) -> None:
    """Only the repeated text itself is computed twice, since it begins with another token."""
    chunks, contexts = overlapping()
    preamble = len(model.preamble)
    dict(encode(model, chunks, contexts))
    assert computed == [preamble + sum(map(len, chunks))]
    computed.clear()
    chunks[1:] = [[contexts[i + 1][-1] + 7, *chunk[1:]] for i, chunk in enumerate(chunks[1:])]  # the document's tokens
    whole = [contexts[4] + chunks[4]]
    chunks = [whole[0][i * 28 : i * 28 + 40] for i in range(5)]
    contexts = [whole[0][: i * 28] for i in range(5)]
    dict(encode(model, chunks, contexts))
    assert computed == [preamble + len(whole[0])]


def test_the_last_layer_ends_at_its_keys(model: Model, hf: Any) -> None:
    """Its output is not needed."""
    run: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: run.append(number))
        for number, layer in enumerate(hf.model.layers)
    ]
    for chunks, contexts in ((CHUNKS, None), ([CHUNKS[1]], None), overlapping()):
        run.clear()
        dict(encode(model, chunks, contexts))
        assert set(run) == set(range(model.num_layers - 1))
    for hook in hooks:
        hook.remove()


def test_trees_hold_every_token_of_every_chunk(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any chunks and contexts."""
    rng = random.Random(0)
    for most_tokens in (1, 60, 4096):
        monkeypatch.setattr("kvrag.ingest.encode.BATCH_TOKENS", most_tokens)
        for _ in range(40):
            rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 20))]
            rows += [row[: rng.randrange(1, len(row) + 1)] + rng.choice(rows) for row in rows]
            cuts = [rng.randrange(len(row)) for row in rows]
            contexts = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
            chunks = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
            made = trees(model, chunks, contexts)
            assert sorted(branch.chunk for tree in made for branch in tree.branches) == list(range(len(rows)))
            for tree in made:
                assert tree.num_tokens == len(tree.ids) + sum(len(branch.ids) for branch in tree.branches)
                assert tree.num_tokens in (len(tree.ids), min(tree.num_tokens, most_tokens))
                for number, first, at, ids in tree.branches:
                    row = tree.ids[:at] + ids
                    assert row == [*model.preamble, *rows[number]]
                    assert row[first:] == chunks[number]
            assert sum(tree.num_tokens for tree in made) <= sum(len(row) + len(model.preamble) for row in rows)


@pytest.mark.parametrize(("family", "block"), [("llama", 1), ("llama", 100), *((family, 33) for family in BRANCHING)])
def test_blocks_of_a_row_give_the_kv_of_one_pass(
    family: str, block: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With branches and without, for chunks that begin and end in any block."""
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    document = [5 + i * 7 % 900 for i in range(130)]
    consecutive = [document[i : i + 30] for i in range(10, 130, 30)], [document[:i] for i in range(10, 130, 30)]
    for chunks, contexts in (consecutive, overlapping()):
        whole = dict(encode(model, chunks, contexts))
        monkeypatch.setattr("kvrag.ingest.encode.CPU_TOKENS", block)
        blocks = dict(encode(model, chunks, contexts))
        monkeypatch.undo()
        assert sorted(blocks) == sorted(whole) == list(range(len(chunks)))
        for number, layers in blocks.items():
            for ours, theirs in zip(layers, whole[number], strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert a.untyped_storage().nbytes() == a.nbytes, "nothing else is kept in memory with it"
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_chunks_of_a_long_row_are_yielded_when_they_are_complete(
    model: Model, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, first = [5 + i * 7 % 900 for i in range(400)], len(model.preamble)
    monkeypatch.setattr("kvrag.ingest.encode.CPU_TOKENS", 100)
    encoded = encode(model, *zip(*[(document[i : i + 40], document[:i]) for i in range(0, 400, 40)], strict=True))
    for number, _ in encoded:
        blocks = -(-(first + (number + 1) * 40) // 100)
        assert sum(computed) == min(blocks * 100, first + 400)
    chunks, contexts = overlapping(length=80, repeated=24)
    computed.clear()
    number, _ = next(encode(model, chunks, contexts))
    assert number == 0
    assert sum(computed) < 200
    dict(encode(model, chunks, contexts))


def test_where_rope_follows_the_length_nothing_is_shared(tokenizer: Any) -> None:
    model_type, changes = FAMILIES["llama-dynamic"]
    model = Model(build(model_type, **changes), tokenizer, "llama-dynamic")
    long = [5 + i % 900 for i in range(model.stable_length + 20)]
    assert len(trees(model, [long[:30], long[30:]], [[], long[:30]])) == 2
