"""A trial on hybrids: chunks in layers of linear attention (the gated delta net of Qwen3-Next and Qwen3.5).

Such a layer keeps a state S, (key dim, value dim) per head, and a token changes it to `S' = A S + B`. The product over
a chunk's tokens is again of that form: an *operator* (A, B), which can be stored and composed in any order. A short
causal convolution before it reads the last three tokens of the chunk before, so a chunk's first three tokens are
applied one by one. Alternatively, what the convolution reads is stored *token by token*. Then single tokens can be
recomputed, and the scan over all tokens gives the state; with no token recomputed, it is the operators' state.

Beside it, the same prompts on a model whose layers are all attention. Tiny models with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    apply_rotary_pos_emb,
    torch_chunk_gated_delta_rule,
)

from kvrag.backend.transformers.cache import as_argument
from kvrag.cli.common import at_least, progress

States = list[tuple[Tensor, ...]]
"""Per layer, what is kept of each token, (1, T, ...): rotated keys and values; or the convolution's inputs, the decay
and beta of a layer of linear attention."""

SHAPES = {
    "Qwen3-Next-80B-A3B": ("qwen3_next", 3.0e9, (48, 4, 128)),  # beside Qwen3-30B-A3B
    "Qwen3.5, default": ("qwen3_5_text", 6.9e9, (36, 8, 128)),  # beside Qwen3-8B
    "Qwen3.5-MoE, default": ("qwen3_5_moe_text", 3.0e9, (48, 4, 128)),
}
"""Model type, parameters that a token uses without embeddings, and the layers, KV heads and head dimension of a model
without linear attention."""

SETTINGS = {"hybrid": (True, False), "hybrid, long memory": (True, True), "dense": (False, False)}
"""Kinds of models: with layers of linear attention or not; states that last longer than as initialised or not."""

VOCABULARY, BEGIN, QUESTION = 512, 3, 8
LENGTHS = (128, 256, 512, 2048)
FLOPS = 4e14  # per second: 40 % of an H100's
RATIOS = (0.15, 0.3, 0.5)


# ----------------------------------------------------------------------------------------------------- the models


def tiny(name: str, seed: int = 0, gain: float = 4.0) -> Any:
    """Return a random model of 8 layers, Qwen3.5's or Qwen3's; by `gain`, its attention is not uniform."""
    is_hybrid, is_slow = SETTINGS[name]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32}
    own = {f"linear_{name}": size for name, size in linear.items()} if is_hybrid else {}
    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3_5_text" if is_hybrid else "qwen3", **sizes, **own)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
            elif is_slow and key.endswith("A_log"):
                parameter.uniform_(-7, -2)  # a state falls to a third within 6 to 800 tokens
    return hf.eval()


def linear_layers(hf: Any) -> list[tuple[int, Any]]:
    """Return the layers of linear attention with their numbers."""
    layers = enumerate(hf.model.layers)
    return [(number, layer.linear_attn) for number, layer in layers if hasattr(layer, "linear_attn")]


# ------------------------------------------------------------------------------------------------- computing tokens


def empty(hf: Any, count: int) -> States:
    """Return the states of a prompt of which nothing is known."""
    config, states = hf.config, States()
    for layer in hf.model.layers:
        if hasattr(layer, "linear_attn"):
            net = layer.linear_attn
            shapes: Sequence[Sequence[int]] = [(net.conv_dim,), (net.num_v_heads,), (net.num_v_heads,)]
        else:
            shapes = [(config.num_key_value_heads, config.head_dim)] * 2
        states.append(tuple(torch.zeros(1, count, *shape) for shape in shapes))
    return states


def compute(hf: Any, ids: Tensor, rows: Tensor, states: States) -> Tensor:
    """Compute the tokens `rows` of a prompt over the states of all its tokens, which are overwritten for those.

    Args:
        ids: (T,).
        rows: (S,) ascending.

    Returns:
        (S, V) logits.
    """
    body = hf.model
    hidden = body.embed_tokens(ids[rows])[None]
    tables = body.rotary_emb(hidden, rows[None])
    mask = (rows[:, None] >= torch.arange(len(ids)))[None, None]
    for layer, kept in zip(body.layers, states, strict=True):
        x = layer.input_layernorm(hidden)
        if hasattr(layer, "linear_attn"):
            mixed = _recurrent(layer.linear_attn, x, rows, kept)
        else:
            mixed = layer.self_attn(x, tables, mask, **as_argument(layer.self_attn, _Written(kept, rows)))[0]
        hidden = hidden + mixed
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: Tensor = hf.lm_head(body.norm(hidden))[0]
    return logits


class _Written:
    """A cache of one layer that writes the computed rows into the others."""

    def __init__(self, kept: tuple[Tensor, ...], rows: Tensor) -> None:
        self._kept, self._rows = kept, rows

    def update(self, *parts: Any, **_: Any) -> list[Tensor]:
        for kept, part in zip(self._kept, parts[:2], strict=True):
            kept[:, self._rows] = part.transpose(1, 2)
        return [kept.transpose(1, 2) for kept in self._kept]


def _recurrent(net: Any, x: Tensor, rows: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
    mixed, decay, beta = kept
    mixed[:, rows], beta[:, rows] = net.in_proj_qkv(x), net.in_proj_b(x).sigmoid()
    decay[:, rows] = -net.A_log.exp() * F.softplus(net.in_proj_a(x) + net.dt_bias)
    out, _ = scan(net, kept)
    gate = net.in_proj_z(x).view(-1, net.head_v_dim)
    out = net.norm(out[:, rows].reshape(-1, net.head_v_dim), gate)
    out = net.out_proj(out.view(1, len(rows), -1))
    return out


def scan(
    net: Any, kept: tuple[Tensor, ...], before: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of a layer's tokens, behind a state and what the convolution read `before`."""
    queries, keys, values = _convolved(net, kept[0], before)
    return _rule(queries, keys, values, kept, state)


def _rule(q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
    out, last = torch_chunk_gated_delta_rule(
        q, k, v, *kept[1:], initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert last is not None
    return out, last


def _convolved(net: Any, mixed: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    edge = net.conv_kernel_size - 1
    left = mixed.new_zeros(1, edge, mixed.shape[2]) if before is None else before
    rows = torch.cat([left, mixed], dim=1).transpose(1, 2)
    rows = F.silu(F.conv1d(rows, net.conv1d.weight, groups=net.conv_dim)).transpose(1, 2)
    parts = torch.split(rows, [net.key_dim, net.key_dim, net.value_dim], dim=2)
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    queries, keys, values = (part.reshape(*part.shape[:2], -1, size) for part, size in zip(parts, sizes, strict=True))
    return queries, keys, values


# ------------------------------------------------------------------------------------------------------- operators


def operator(net: Any, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return A (1, H, K, K) and B (1, H, K, V) of a chunk's tokens but its first three: the state becomes A S + B."""
    edge = net.conv_kernel_size - 1
    queries, keys, values = (part[:, edge:] for part in _convolved(net, kept[0], None))
    size = keys.shape[3]
    zeros = values.new_zeros(*values.shape[:3], size)
    eye = torch.eye(size).expand(1, net.num_v_heads, size, size)
    start = torch.cat([eye, values.new_zeros(1, net.num_v_heads, size, net.head_v_dim)], dim=3)
    rest = tuple(part[:, edge:] for part in kept)
    _, last = _rule(queries, keys, torch.cat([zeros, values], dim=3), rest, start)
    return last[..., :size], last[..., size:]


def composed(net: Any, chunks: Sequence[tuple[Tensor, ...]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the state behind chunks by their operators, stored in `dtype`."""
    edge, state, before = net.conv_kernel_size - 1, None, None
    for kept in chunks:
        _, state = scan(net, tuple(part[:, :edge] for part in kept), before, state)
        if kept[0].shape[1] > edge:
            a, b = (part.to(dtype).float() for part in operator(net, kept))
            state = a @ state + b
        before = kept[0][:, -edge:]
    assert state is not None
    return state


# --------------------------------------------------------------------------------------------------------- prompts


def prompt(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, list[slice]]:
    """Draw the (T,) ids of a prompt with `count` chunks, and the chunks' places."""
    ids = torch.randint(VOCABULARY, (BEGIN + count * length + QUESTION,), generator=generator)
    return ids, [slice(start, start + length) for start in range(BEGIN, BEGIN + count * length, length)]


def encode(hf: Any, ids: Tensor, chunks: Sequence[slice]) -> States:
    """Return the states of a prompt whose chunks were each computed alone, behind the beginning."""
    states = empty(hf, len(ids))
    for chunk in chunks:
        alone = torch.cat([ids[:BEGIN], ids[chunk]])
        own = empty(hf, len(alone))
        compute(hf, alone, torch.arange(len(alone)), own)
        tables = hf.model.rotary_emb(own[-1][0], torch.tensor([[chunk.start - BEGIN]]))
        for layer, kept, new in zip(hf.model.layers, states, own, strict=True):
            for number, (part, fresh) in enumerate(zip(kept, new, strict=True)):
                moved = fresh[:, BEGIN:]
                if number == 0 and hasattr(layer, "self_attn"):
                    moved = apply_rotary_pos_emb(moved, moved, *tables, unsqueeze_dim=2)[1]
                part[:, chunk], part[:, :BEGIN] = moved, fresh[:, :BEGIN]
    return states


# -------------------------------------------------------------------------------------------------- the measurement


@torch.inference_mode()
def measure(hf: Any, ids: Tensor, chunks: Sequence[slice]) -> tuple[dict[str, float], list[float]]:
    """Return the KL of the last token by variant, and the error of each layer's last state (or of its values)."""
    whole, every = empty(hf, len(ids)), torch.arange(len(ids))
    full = compute(hf, ids, every, whole)[-1].log_softmax(0)
    stored = encode(hf, ids, chunks)
    end = chunks[-1].stop
    moved = [(new - old)[0, BEGIN:end].flatten(1).square().sum(1) for new, old in zip(whole[1], stored[1], strict=True)]
    by_deviation = torch.stack(moved).sum(0).argsort(descending=True) + BEGIN  # of layer 1, as CacheBlend chooses
    at_random = torch.randperm(end - BEGIN) + BEGIN
    chosen = {"plain reuse": every[:0]}
    for ratio in RATIOS:
        budget = round(ratio * (end - BEGIN))
        chosen[f"{ratio:.0%} of the tokens by deviation"] = by_deviation[:budget].sort().values
        chosen[f"{ratio:.0%} of the tokens at random"] = at_random[:budget].sort().values
    for number in range(1, len(chunks) // 2 + 1):
        chosen[f"{number} of {len(chunks)} chunks, behind the first"] = every[chunks[1].start : chunks[number].stop]
        chosen[f"{number} of {len(chunks)} chunks, the last"] = every[chunks[-number].start : end]
    divergences = {}
    for name, rows in chosen.items():
        states = [tuple(part.clone() for part in kept) for kept in stored]
        logits = compute(hf, ids, torch.cat([rows, every[end:]]), states)[-1].log_softmax(0)
        divergences[name] = float((full.exp() * (full - logits)).sum())
    parts = zip(hf.model.layers, stored, whole, strict=True)
    return divergences, [_error(layer, ours, true, end) for layer, ours, true in parts]


def _error(layer: Any, stored: tuple[Tensor, ...], whole: tuple[Tensor, ...], end: int) -> float:
    """Return the relative error of a layer's state behind `end` tokens, or of its values of these."""
    if hasattr(layer, "linear_attn"):
        ours, true = (scan(layer.linear_attn, tuple(part[:, :end] for part in kept))[1] for kept in (stored, whole))
    else:
        ours, true = stored[1][:, BEGIN:end], whole[1][:, BEGIN:end]
    return float((ours - true).norm() / true.norm())


# ------------------------------------------------------------------------------------------------- sizes and times


def sizes(shape: str, length: int) -> dict[str, float]:
    """Return the megabytes of a chunk in each form, and the GB/s at which loading takes as long as computing it."""
    kind, active, (layers, heads, size) = SHAPES[shape]
    config = AutoConfig.for_model(kind)
    linear = config.layer_types.count("linear_attention")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    keys_of_all = config.linear_num_value_heads * config.linear_key_head_dim  # a key head serves several value heads
    edges = 2 * (config.linear_conv_kernel_dim - 1)  # the first and the last tokens, for the convolution
    numbers = {
        "attention": (config.num_hidden_layers - linear) * 2 * config.num_key_value_heads * config.head_dim * length,
        "operators": linear * (config.linear_key_head_dim * (keys_of_all + values) + edges * (2 * keys + values)),
        "token by token": linear * (keys + values + 2 * config.linear_num_value_heads) * length,
        "dense": layers * 2 * heads * size * length,
    }
    megabytes = {name: 2 * count / 1e6 for name, count in numbers.items()}  # two bytes each
    seconds = 2 * active * length / FLOPS
    megabytes["break-even, GB/s"] = (megabytes["attention"] + megabytes["operators"]) / 1e3 / seconds
    megabytes["break-even of dense"] = megabytes["dense"] / 1e3 / seconds
    return megabytes


@torch.inference_mode()
def times(lengths: Sequence[int], repeats: int = 3) -> dict[int, list[float]]:
    """Return, per chunk length, the ms of a layer of Qwen3.5's default shape: the mixer, its scan, one composition."""
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=1)
    net = Qwen3_5GatedDeltaNet(config, 0).eval()
    a, state = torch.rand(2, 1, config.linear_num_value_heads, net.head_k_dim, net.head_k_dim)
    found = {}
    for length in lengths:
        x = torch.randn(1, length, config.hidden_size)
        kept = tuple(torch.rand(1, length, size) for size in (net.conv_dim, net.num_v_heads, net.num_v_heads))
        kept = (kept[0], -kept[1], kept[2])
        calls = (partial(net, x), partial(scan, net, kept), partial(torch.baddbmm, state[0], a[0], state[0]))
        found[length] = [min(_seconds(call) for _ in range(repeats)) * 1e3 for call in calls]
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


# ----------------------------------------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--samples", type=at_least(1), default=20, metavar="N", help="prompts per model (default: 20)")
    parser.add_argument("--models", type=at_least(1), default=3, metavar="N", help="random models (default: 3)")
    parser.add_argument("--chunks", type=at_least(1), default=8, metavar="N", help="per prompt (default: 8)")
    parser.add_argument("--chunk-tokens", type=at_least(4), default=64, metavar="N", help="default: 64")
    parser.add_argument("--seed", type=at_least(0), default=0)


def run(args: argparse.Namespace) -> int:
    """Measure and print sizes, times, errors and divergences."""
    result: dict[str, Any] = {"command": " ".join(sys.argv)}
    result["sizes"] = {shape: {length: sizes(shape, length) for length in LENGTHS} for shape in SHAPES}
    result["ms"] = times(LENGTHS[:3])
    for name in SETTINGS:
        records = []
        with progress(name, args.json) as update:
            for number in range(args.models * args.samples):
                seed = args.seed + number // args.samples
                if number % args.samples == 0:
                    hf, generator = tiny(name, seed), torch.Generator().manual_seed(seed)
                update(number, args.models * args.samples)
                records.append(measure(hf, *prompt(args.chunks, args.chunk_tokens, generator)))
        kl = {key: sum(record[0][key] for record in records) / len(records) for key in records[0][0]}
        result[name] = {"kl": kl, "errors": torch.tensor([errors for _, errors in records]).mean(0).tolist()}
    print(json.dumps(result) if args.json else "\n".join(_lines(result)))
    return 0


def _lines(result: dict[str, Any]) -> list[str]:
    lines = ["megabytes of a chunk's part, two bytes per number"]
    for shape, table in result["sizes"].items():
        lines += [f"{shape}, {length} tokens: " + _joined(row) for length, row in table.items()]
    lines += ["", "ms of a layer of Qwen3.5's default shape, one thread: mixer, scan, composing"]
    lines += [f"{length} tokens: {', '.join(f'{ms:.1f}' for ms in row)}" for length, row in result["ms"].items()]
    for name in SETTINGS:
        lines += [
            "",
            f"{name}: relative error by layer " + " ".join(f"{error:.2f}" for error in result[name]["errors"]),
        ]
        plain = result[name]["kl"]["plain reuse"]
        lines += [f"{key:40}{kl:>8.4f}{kl / max(plain, 1e-9):>7.0%}" for key, kl in result[name]["kl"].items()]
    return lines


def _joined(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in row.items())
