"""`python -m benchmarks workloads`: its requests, without a server, and a run on `kvrag serve`."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from benchmarks.__main__ import main
from benchmarks.shapes import one_token_words
from benchmarks.speed.workloads import ORIGINAL, WORKLOADS, Workload
from kvrag import BlendEngine, Model

SMALL = {"num_permutations": 4, "num_contexts": 3, "num_documents": 3, "num_prompts": 40, "num_prefixes": 4}


def made(model: Model, name: str, seed: int = 0, **options: Any) -> Workload:
    defaults = {option: default for option, (default, _) in ORIGINAL.items()} | {"repeat_mode": "random"}
    return WORKLOADS[name](defaults | SMALL | options, 0.02, one_token_words(model), random.Random(seed))


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_requests(model: Model, name: str) -> None:
    assert made(model, name) == made(model, name)
    assert made(model, name).prompts != made(model, name, seed=1).prompts


def test_every_permutation_is_another_order_of_the_same_contexts(model: Model) -> None:
    work = made(model, "permutator")
    assert (len(work.documents), len(set(work.prompts)), work.clients, work.output_tokens) == (3, 4, 1, 3)
    systems = {prompt.split("\n\n")[0] for prompt in work.prompts}
    assert [len(model.tokenizer.encode(text)) for text in (*work.documents, *systems)] == [100, 100, 100, 20]
    assert all(sorted(prompt.split("\n\n")[1:]) == sorted(work.documents) for prompt in work.prompts)
    assert len(made(model, "permutator", num_permutations=100).prompts) == 6  # there are no more
    assert made(model, "permutator", system_prompt_length=0).prompts[0].count("\n\n") == 2


def test_documents_repeat_in_the_order_of_the_mode(model: Model) -> None:
    a, b, c = made(model, "document-qa").documents
    assert made(model, "document-qa", repeat_mode="tile").prompts == [a, b, c, a, b, c]
    assert made(model, "document-qa", repeat_mode="interleave").prompts == [a, a, b, b, c, c]
    work = made(model, "document-qa", repeat_count=4)
    assert Counter(work.prompts) == {a: 4, b: 4, c: 4}
    assert work.clients == 12
    assert not set(work.warm_up) & set(work.prompts)


def test_every_prefix_has_the_same_number_of_suffixes(model: Model) -> None:
    work = made(model, "prefix", num_prompts=43)
    starts = Counter(document for prompt in work.prompts for document in work.documents if prompt.startswith(document))
    assert sorted(starts.values()) == [10] * 4
    assert len(set(work.prompts)) == 40
    assert {len(model.tokenizer.encode(prompt)) for prompt in work.prompts} == {10}  # 256 and 256 at this scale


def test_a_running_server_answers_them(engine: BlendEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serving(engine) as served:
        small = ["--scale", "0.02", "--num-contexts", "2", "--num-permutations", "2", "--body", '{"controller": "off"}']
        args = ["workloads", "--workloads", "permutator", *small, "--base-url", served.url, "--warm", "--json"]
        assert main(args) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["requests"], row["way"]) == (2, "served")
    assert row["cached"] >= 2 * 2 * 95
    assert row["cached"] + row["computed"] >= row["prompt_tokens"]
    assert row["warm_s"] > 0
