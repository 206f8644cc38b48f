"""The witness's architecture for training: the reader with gated delta nets in some of its layers.

One context is computed once, followed by many questions, each of which sees the context and itself. `export` writes the
student as transformers' `qwen3_5_text`. Attention layers keep the reader's form here: see `export` for how they become
Qwen's, which normalises queries and keys and gates the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu, softplus

GUIDED = (4, 6)
"""Layers of the reader with supervised attention heads: the first fact, then the last."""
CONV, CHUNK = 4, 32


@dataclass(frozen=True)
class Size:
    """The reader's size."""

    vocab_size: int = 1418
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 8
    num_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 1e6
    eps: float = 1e-6


@dataclass
class Layout:
    """The parts of a batch that the layers need: `num_context` tokens, then `num_questions` questions of equal length.

    Attributes:
        lengths: (B,) of the contexts.
        valid: (B, C) bool.
        cos, sin: (B, T, 1, D).
        padding: (B, C), added to scores; own: (L, L) likewise within a question.
    """

    num_context: int
    num_questions: int
    lengths: Tensor
    valid: Tensor
    cos: Tensor
    sin: Tensor
    padding: Tensor
    own: Tensor


class Net(nn.Module):
    """The reader (`recurrent` empty) or its hybrid."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, recurrent: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.size, self.recurrent = size, recurrent
        self.model = Body(size, recurrent)
        angles = torch.arange(4096)[:, None] / size.rope_theta ** (torch.arange(0, size.head_dim, 2) / size.head_dim)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def layout(self, context: Tensor, lengths: Tensor, questions: Tensor) -> Layout:
        """Describe (B, C) contexts of `lengths` and (B, Q, L) questions."""
        _, num, length = questions.shape
        before = torch.arange(context.shape[1]).expand(context.shape[0], -1)
        positions = torch.cat([before, lengths[:, None] + torch.arange(length).repeat(num)], 1)
        valid = before < lengths[:, None]
        padding = torch.zeros(context.shape).masked_fill_(~valid, -1e4)
        own = torch.full((length, length), -1e4).triu(1)
        cos, sin = (table[positions][:, :, None] for table in (self.cos, self.sin))
        return Layout(context.shape[1], num, lengths, valid, cos, sin, padding, own)

    def run(self, ids: Tensor, layout: Layout) -> tuple[list[Tensor], list[Tensor]]:
        """Return the residual stream before each layer and after the last, and every mixer's output; (B, T, hidden)."""
        x = self.model.embed_tokens(ids)
        streams, mixed = [x], []
        for layer in self.model.layers:
            out = layer.mixer(layer.input_layernorm(x), layout)
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            streams.append(x)
            mixed.append(out)
        return streams, mixed

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and logits."""
        return matrix(self.model.norm(hidden), self.model.embed_tokens.weight)

    def looks(self, streams: list[Tensor], layout: Layout, pointers: Tensor) -> Tensor:
        """Return (P, C) log-probabilities of the guided heads' attention on the context."""
        scores = []
        for number in GUIDED:
            layer, dims, at = self.model.layers[number], 2 * self.size.head_dim, layout.num_context
            x = layer.input_layernorm(streams[number])
            q = matrix(x[:, at:], layer.mixer.q_proj.weight[:dims]).unflatten(-1, (2, -1))
            k = matrix(x[:, :at], layer.mixer.k_proj.weight[:dims]).unflatten(-1, (2, -1))
            q = _rotate(q, layout.cos[:, at:], layout.sin[:, at:])
            k = _rotate(k, layout.cos[:, :at], layout.sin[:, :at])
            scores.append(
                torch.einsum("bqhd,bchd->bqhc", q, k) * self.size.head_dim**-0.5 + layout.padding[:, None, None]
            )
        rows, tokens, depths, heads = pointers
        return torch.stack(scores)[depths, rows, tokens, heads].log_softmax(-1)


class Body(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, size: Size, recurrent: tuple[int, ...]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(Layer(size, number in recurrent) for number in range(size.num_hidden_layers))
        self.norm = Norm(size)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size.hidden_size))
        self.eps = size.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Matrix(nn.Linear):
    """A linear map that computes in bfloat16, several times as fast as float32; float32 in and out."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., num_in) -> (..., num_out)."""
        return matrix(x, self.weight)


def matrix(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` in bfloat16, from and to float32."""
    return linear(x.bfloat16(), weight.bfloat16()).float()


class Layer(nn.Module):
    """A mixer (attention or gated delta net) and a feed-forward part."""

    def __init__(self, size: Size, recurrent: bool) -> None:
        super().__init__()
        self.mixer = DeltaNet(size) if recurrent else Attention(size)
        self.mlp = FeedForward(size)
        self.input_layernorm = Norm(size)
        self.post_attention_layernorm = Norm(size)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = Matrix(size.hidden_size, size.intermediate_size)
        self.up_proj = Matrix(size.hidden_size, size.intermediate_size)
        self.down_proj = Matrix(size.intermediate_size, size.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, hidden_size) to the same shape."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """The reader's attention, with RoPE."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim, dim = size.head_dim, size.num_heads * size.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Matrix(size.hidden_size, dim) for _ in range(3))
        self.o_proj = Matrix(dim, size.hidden_size)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Attend over (B, T, hidden_size)."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, layout.cos, layout.sin), _rotate(k, layout.cos, layout.sin)
        at, scale = layout.num_context, self.head_dim**-0.5
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        context = scaled_dot_product_attention(q[:, :, :at], k[:, :, :at], v[:, :, :at], is_causal=True)
        q = q[:, :, at:] * scale
        q_own, k_own, v_own = (
            part.unflatten(2, (layout.num_questions, -1)) for part in (q, k[:, :, at:], v[:, :, at:])
        )
        before = q @ k[:, :, :at].transpose(-1, -2) + layout.padding[:, None, None]
        own = q_own @ k_own.transpose(-1, -2) + layout.own
        weights = torch.cat([before, own.flatten(2, 3)], -1).softmax(-1)
        from_own = weights[..., at:].unflatten(2, (layout.num_questions, -1)) @ v_own
        questions = weights[..., :at] @ v[:, :, :at] + from_own.flatten(2, 3)
        return self.o_proj(torch.cat([context, questions], 2).transpose(1, 2).flatten(2))


class DeltaNet(nn.Module):
    """Gated delta net with transformers' names and arithmetic; as many value heads as key heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = size.num_heads, size.head_dim, size.eps
        dim = size.num_heads * size.head_dim
        self.in_proj_qkv = Matrix(size.hidden_size, 3 * dim)
        self.in_proj_z = Matrix(size.hidden_size, dim)
        self.in_proj_b = Matrix(size.hidden_size, size.num_heads)
        self.in_proj_a = Matrix(size.hidden_size, size.num_heads)
        self.conv = nn.Parameter(torch.zeros(3 * dim, CONV))
        self.dt_bias = nn.Parameter(torch.zeros(size.num_heads))
        self.A_log = nn.Parameter(torch.zeros(size.num_heads))
        self.norm_weight = nn.Parameter(torch.ones(size.head_dim))
        self.out_proj = Matrix(dim, size.hidden_size)

    @torch.no_grad()
    def start(self, attention: Attention) -> None:
        """Take the attention's projections; heads remember 8 to 1,000 tokens to begin with."""
        self.in_proj_qkv.weight.copy_(
            torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
        self.out_proj.weight.copy_(attention.o_proj.weight)
        self.conv.zero_()[:, -1] = 1.0
        for weight in (self.in_proj_a.weight, self.in_proj_b.weight):
            weight.normal_(std=0.01)
        self.in_proj_z.weight.normal_(std=0.06)
        self.A_log.zero_()
        rate = 1 / torch.tensor([8.0, 40.0, 200.0, 1000.0])[torch.arange(self.num_heads) % 4]
        self.dt_bias.copy_(rate.expm1().log())  # softplus of it is the rate

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix (B, T, hidden_size) over time."""
        at, num = layout.num_context, layout.num_questions
        qkv = self.in_proj_qkv(x)
        beta = self.in_proj_b(x).sigmoid()
        decay = -self.A_log.exp() * softplus(self.in_proj_a(x) + self.dt_bias)
        context = silu(_convolve(pad(qkv[:, :at], (0, 0, CONV - 1, 0)), self.conv))
        ends = layout.lengths[:, None] + torch.arange(1 - CONV, 0)
        window = qkv[:, :at].gather(1, ends[..., None].expand(-1, -1, qkv.shape[-1]))  # (B, 3, 3 * dim)
        asked = qkv[:, at:].unflatten(1, (num, -1))  # (B, Q, L, 3 * dim)
        asked = torch.cat([window[:, None].expand(-1, num, -1, -1), asked], 2)
        asked = silu(_convolve(asked.flatten(0, 1), self.conv)).unflatten(0, (-1, num))
        valid = layout.valid[..., None]  # padding neither decays nor writes
        out, state = self.scan(context, decay[:, :at] * valid, beta[:, :at] * valid)
        own = self.asks(asked, decay[:, at:].unflatten(1, (num, -1)), beta[:, at:].unflatten(1, (num, -1)), state)
        out = torch.cat([out, own], 1)  # (B, T, H, D)
        out = nn.functional.rms_norm(out, (self.head_dim,), self.norm_weight, self.eps)
        return self.out_proj(out.flatten(2) * silu(self.in_proj_z(x)))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (..., T, 3 * dim) into (..., H, T, D) each; queries and keys have length 1."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for part in qkv.chunk(3, -1))
        return _unit(q) * self.head_dim**-0.5, _unit(k), v

    def scan(self, qkv: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Run over the contexts; return (B, C, H, D) and the (B, H, D, D) state after them."""
        q, k, v = (part.unflatten(2, (-1, CHUNK)) for part in self.heads(qkv))  # (B, H, N, CHUNK, D)
        decay, beta = (part.transpose(1, 2).unflatten(2, (-1, CHUNK)) for part in (decay, beta))  # (B, H, N, CHUNK)
        read, write, weights, total = _within(q, k, v, decay, beta)
        q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
        last = total[..., -1].exp()[..., None, None]
        state = torch.zeros(*q.shape[:2], self.head_dim, self.head_dim)
        outs = []
        for index in range(q.shape[2]):
            new = write[:, :, index] - read[:, :, index] @ state
            outs.append(q[:, :, index] @ state + weights[:, :, index] @ new)
            state = state * last[:, :, index] + k[:, :, index].transpose(-1, -2) @ new
        return torch.cat(outs, 2).transpose(1, 2), state

    def asks(self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """Run (B, Q, L, 3 * dim) questions from the state; return (B, Q * L, H, D)."""
        q, k, v = (part.transpose(1, 2) for part in self.heads(qkv))  # (B, H, Q, L, D)
        decay, beta = (part.permute(0, 3, 1, 2) for part in (decay, beta))  # (B, H, Q, L)
        read, write, weights, total = _within(q, k, v, decay, beta)
        num = q.shape[2]
        new = write - (read.flatten(2, 3) @ state).unflatten(2, (num, -1))
        out = ((q * total.exp()[..., None]).flatten(2, 3) @ state).unflatten(2, (num, -1)) + weights @ new
        return out.flatten(2, 3).transpose(1, 2)


def _within(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a chunk reads of the state before it, writes on its own, attends to within, and its decays."""
    total = decay.cumsum(-1)
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(~mask, -1e4).exp()
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * pairs
    right = torch.cat([v * beta[..., None], k * (beta * total.exp())[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    write, read = solved.chunk(2, -1)
    return read, write, q @ k.transpose(-1, -2) * pairs, total


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of (N, T + 3, dim), without the first 3."""
    num = x.shape[1] - CONV + 1
    out = x[:, :num] * weight[:, 0]
    for tap in range(1, CONV):
        out = torch.addcmul(out, x[:, tap : tap + num], weight[:, tap])
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
