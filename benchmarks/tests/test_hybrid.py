"""The reader as a hybrid: what is trained is what transformers computes, and what is measured."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.readers.hybrid import net as hybrid
from benchmarks.readers.hybrid.data import Shape, make_batch
from benchmarks.readers.hybrid.export import export
from benchmarks.readers.hybrid.measure import Record, table
from benchmarks.readers.hybrid.train import READER, convert, load_reader


@pytest.mark.parametrize("recurrent", [(), (0, 1, 2, 3, 5, 7)])
def test_transformers_computes_what_was_trained(
    recurrent: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "matrix", linear)  # in float32
    torch.manual_seed(0)
    net = convert(load_reader(), recurrent).requires_grad_(False)
    for module in net.modules():
        if isinstance(module, hybrid.DeltaNet):
            for part in (module.conv, module.in_proj_a.weight, module.in_proj_b.weight):
                part.normal_(std=0.2)
    export(net, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = make_batch(AutoTokenizer.from_pretrained(READER), random.Random(0), "train", Shape((1, 2), 3, 224, 4))
    layout = net.layout(batch.context, batch.lengths, batch.questions)
    streams, _ = net.run(torch.cat([batch.context, batch.questions.flatten(1)], 1), layout)
    ours = net.logits(streams[-1][:, layout.num_context :]).view(*batch.questions.shape, -1)
    for row, question in ((0, 0), (2, 3)):  # of different lengths
        asked = batch.questions[row, question]
        asked = asked[asked != batch.padding]
        ids = torch.cat([batch.context[row, : batch.lengths[row]], asked])
        theirs = hf(ids[None]).logits[0, -len(asked) :]
        torch.testing.assert_close(ours[row, question, : len(asked)], theirs, rtol=0, atol=1e-3)


def test_a_table_divides_by_full_prefills_right_answers() -> None:
    full = [Record("full", is_right, True, 0.0, 100, 100) for is_right in (True, True, False, True)]
    tail = [Record("tail", is_right, False, 0.5, 20, 100) for is_right in (True, False, False, True)]
    lines = table([[one, other] for one, other in zip(full, tail, strict=True)])
    assert lines[2].startswith("| full | 75.0% | 100.0% (100.0% to 100.0%) | 100.0% | 0.000 | 100% |")
    assert lines[3].startswith("| tail | 50.0% | 66.7% (")
    assert lines[3].endswith("| 0.0% | 0.500 | 20% |")
