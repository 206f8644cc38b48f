"""Write the witness as transformers' `qwen3_5_text`: `python -m benchmarks.readers.hybrid.export DIR OUT`.

DIR is a training's folder, OUT gets a model that kvrag loads. Qwen's attention normalises queries and keys and gates
the output, the reader's does neither. Both are undone exactly: projections of 2**-20 of their size lie below the norm's
epsilon, which makes it a constant factor, and gates of zero halve an output that its projection doubles.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5TextConfig

from benchmarks.readers.hybrid.net import DeltaNet, Net
from benchmarks.readers.hybrid.train import READER, load_net

_SMALL = 2.0**-20


def tensors(net: Net) -> dict[str, Tensor]:
    """Return the weights under transformers' names, float32."""
    weights = {
        "model.embed_tokens.weight": net.model.embed_tokens.weight,
        "model.norm.weight": net.model.norm.weight - 1,
    }
    size = net.size
    for number, layer in enumerate(net.model.layers):
        name, mixer = f"model.layers.{number}", layer.mixer
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = getattr(layer, norm).weight - 1
        for proj in ("gate_proj", "up_proj", "down_proj"):
            weights[f"{name}.mlp.{proj}.weight"] = getattr(layer.mlp, proj).weight
        if isinstance(mixer, DeltaNet):
            for proj in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
                weights[f"{name}.linear_attn.{proj}.weight"] = getattr(mixer, proj).weight
            weights[f"{name}.linear_attn.conv1d.weight"] = mixer.conv[:, None]
            weights[f"{name}.linear_attn.norm.weight"] = mixer.norm_weight
            weights |= {f"{name}.linear_attn.{part}": getattr(mixer, part) for part in ("dt_bias", "A_log")}
        else:
            query = mixer.q_proj.weight.unflatten(0, (size.num_heads, size.head_dim)) * _SMALL
            gated = torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1)
            weights[f"{name}.self_attn.q_proj.weight"] = gated
            weights[f"{name}.self_attn.k_proj.weight"] = mixer.k_proj.weight * _SMALL
            weights[f"{name}.self_attn.v_proj.weight"] = mixer.v_proj.weight
            weights[f"{name}.self_attn.o_proj.weight"] = mixer.o_proj.weight * 2
            for norm in ("q_norm", "k_norm"):
                weights[f"{name}.self_attn.{norm}.weight"] = torch.full((size.head_dim,), size.eps**0.5 / _SMALL - 1)
    return {name: tensor.detach().float().contiguous().clone() for name, tensor in weights.items()}


def export(net: Net, folder: Path) -> None:
    """Write the model and the reader's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = json.loads((READER / "config.json").read_text())
    size, kinds = net.size, ("full_attention", "linear_attention")
    config = Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        **{name: reader[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
           "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")},
        rope_parameters={
            "rope_type": "default",
            "rope_theta": size.rope_theta,
            "partial_rotary_factor": 1.0,
            "mrope_section": [11, 11, 10],
        },
        partial_rotary_factor=1.0,
        linear_num_key_heads=size.num_heads,
        linear_num_value_heads=size.num_heads,
        linear_key_head_dim=size.head_dim,
        linear_value_head_dim=size.head_dim,
        layer_types=[kinds[number in net.recurrent] for number in range(size.num_hidden_layers)],
        dtype="float32",
        kvrag_world=1,
    )  # fmt: skip
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(READER / name, folder / name)
    save_file(tensors(net), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    export(load_net(Path(sys.argv[1])), Path(sys.argv[2]))
