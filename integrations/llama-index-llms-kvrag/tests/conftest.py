"""The fixtures of LlamaIndex's packages, and a random model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from families import build
from llama_index_fixtures import *  # noqa: F403

from kvrag import Model


@pytest.fixture(scope="session")
def tiny(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model that never generates a control token, with a chat template that names all roles."""
    tokenizer = copy.deepcopy(model.tokenizer.hf)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    hf = build("llama", vocab_size=len(tokenizer), max_position_embeddings=2048, **ids)
    with torch.no_grad():
        hf.lm_head.weight[tokenizer.all_special_ids] = 0  # some other token's logit is above
    folder = tmp_path_factory.mktemp("tiny")
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
