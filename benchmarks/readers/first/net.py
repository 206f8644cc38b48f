"""The reader's architecture for training: a Llama with many questions per context.

Parameters have the names and meaning of transformers' `LlamaForCausalLM`, which loads the weights unchanged. The layout
differs: a context is computed once, followed by many questions that attend to the context and to themselves only.
This is several times cheaper than one sequence per question, or one long sequence with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

POINTING = (1 / 2, 3 / 4)
"""Layers with supervised attention heads: the first head of both, the second head of the latter."""


@dataclass(frozen=True)
class Size:
    """Size, as fields of transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


class Net(nn.Module):
    """Training form of the reader."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = Body(size)
        self.subject = Matrix(size.hidden_size, size.hidden_size)  # this and the next are used for training only
        self.answer = Matrix(size.hidden_size, size.hidden_size)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        angles = torch.arange(8192)[:, None] / size.rope_theta ** (torch.arange(0, size.head_dim, 2) / size.head_dim)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def forward(
        self, context: Tensor, lengths: Tensor, questions: Tensor, pointers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return final hidden states of the questions, midway hidden states of the context, and some heads' attention.

        Args:
            context: (B, C) ids, right-padded.
            lengths: (B,) lengths of the contexts.
            questions: (B, Q, L) ids, right-padded.
            pointers: (4, P) row, token within its questions, index in `POINTING`, head: the attention to return.

        Returns:
            (B, Q, L, hidden_size) and (B, C, hidden_size) in bfloat16, (P, C) log-probabilities in float32.
        """
        guided = [int(depth * self.size.num_hidden_layers) for depth in POINTING]
        x, half_way, scores = self._run(context, lengths, questions, guided)
        rows, tokens, depths, heads = pointers
        looks = torch.stack([scores[number] for number in guided])[depths, rows, tokens, heads].log_softmax(-1)
        asked = self.model.norm(x[:, context.shape[1] :]).view(*questions.shape, -1)
        return asked, half_way[:, : context.shape[1]].bfloat16(), looks

    def read(self, context: Tensor, lengths: Tensor, questions: Tensor) -> tuple[Tensor, Tensor]:
        """Return final hidden states of the questions and of the context; arguments and shapes as in `forward`."""
        x, _, _ = self._run(context, lengths, questions, ())
        x = self.model.norm(x)
        return x[:, context.shape[1] :].view(*questions.shape, -1), x[:, : context.shape[1]]

    def _run(
        self, context: Tensor, lengths: Tensor, questions: Tensor, guided: Sequence[int]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the residual stream after all layers and half-way, and the attention scores of the layers `guided`."""
        batch, num_questions, length = questions.shape
        ids = torch.cat([context, questions.flatten(1)], 1)
        before = torch.arange(context.shape[1], device=ids.device).expand(batch, -1)
        after = lengths[:, None] + torch.arange(length, device=ids.device).repeat(num_questions)
        positions = torch.cat([before, after], 1)
        cos, sin = (table[positions][:, :, None].bfloat16() for table in (self.cos, self.sin))  # (B, T, 1, D)
        padding = torch.zeros(context.shape, device=ids.device).masked_fill_(before >= lengths[:, None], -1e4)
        own = torch.full((length, length), -1e4, device=ids.device).triu(1)
        x = half_way = self.model.embed_tokens(ids)  # the residual stream is float32, because late layers add little
        scores: dict[int, Tensor] = {}
        for number, layer in enumerate(self.model.layers):
            if number in guided and isinstance(layer, Layer):
                scores[number] = self._look(layer, x, cos, sin, padding)
            x = layer(x, cos, sin, padding.bfloat16(), own.bfloat16(), num_questions)
            if number + 1 == self.size.num_hidden_layers // 2:
                half_way = x
        return x, half_way, scores

    def _look(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
        """Return (B, Q * L, 2, C) float32 attention scores of the layer's first two heads on the context.

        Auxiliary target of the training: the location of the fact is supervised.
        """
        x, num_context, num_dims = layer.input_layernorm(x), padding.shape[1], 2 * self.size.head_dim
        q_proj, k_proj = (proj.weight[:num_dims] for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj))
        q, k = (linear(x, weight.bfloat16()).view(*x.shape[:2], 2, -1) for weight in (q_proj, k_proj))
        q = _rotate(q[:, num_context:], cos[:, num_context:], sin[:, num_context:])
        k = _rotate(k[:, :num_context], cos[:, :num_context], sin[:, :num_context])
        return torch.einsum("bqhd,bchd->bqhc", q, k) * self.size.head_dim**-0.5 + padding[:, None, None]

    def subject_logits(self, half_way: Tensor) -> Tensor:
        """Return logits of the first token of the name that each context token is about; float32.

        Auxiliary target of the training: pronouns must be resolved midway, so that facts are stored under names.
        """
        return self.logits(self.subject(half_way))

    def answer_logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the answer's first token, predicted at a token of the question; float32.

        Auxiliary target of the training: every question token can predict the answer, not only the last one.
        """
        return self.logits(self.answer(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, tied to the embeddings; float32."""
        return linear(hidden, self.model.embed_tokens.weight.bfloat16()).float()


class Body(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_hidden_layers))
        self.norm = Norm(size)


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size.hidden_size))
        self.eps = size.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., hidden_size) to the same shape in bfloat16."""
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight).bfloat16()


class Matrix(nn.Module):
    """A linear map in bfloat16 with float32 weights."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))

    def forward(self, x: Tensor) -> Tensor:
        """(..., num_in) -> (..., num_out)."""
        return linear(x, self.weight.bfloat16())


class Layer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = FeedForward(size)
        self.input_layernorm = Norm(size)
        self.post_attention_layernorm = Norm(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor, own: Tensor, num_questions: int) -> Tensor:
        """Apply the layer to (B, T, hidden_size); other arguments as in `attend`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, padding, own, num_questions)
        return x + self.mlp(self.post_attention_layernorm(x))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = Matrix(size.intermediate_size, size.hidden_size)
        self.up_proj = Matrix(size.intermediate_size, size.hidden_size)
        self.down_proj = Matrix(size.hidden_size, size.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, hidden_size) to the same shape."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with RoPE."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.groups = size.num_attention_heads // size.num_key_value_heads  # query heads per KV head
        self.q_proj = Matrix(size.num_attention_heads * size.head_dim, size.hidden_size)
        self.k_proj = Matrix(size.num_key_value_heads * size.head_dim, size.hidden_size)
        self.v_proj = Matrix(size.num_key_value_heads * size.head_dim, size.hidden_size)
        self.o_proj = Matrix(size.hidden_size, size.num_attention_heads * size.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor, own: Tensor, num_questions: int) -> Tensor:
        """Attend over (B, T, hidden_size); other arguments as in `attend`."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(x).view(*x.shape[:2], -1, self.head_dim) for proj in projections)  # (B, T, H, D)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.groups > 1:
            k, v = (part.repeat_interleave(self.groups, dim=2) for part in (k, v))
        return self.o_proj(attend(q, k, v, padding, own, num_questions).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, own: Tensor, num_questions: int) -> Tensor:
    """Attend causally; question tokens attend to the context and to earlier tokens of their own question.

    Args:
        q, k, v: (B, T, H, D), the context's tokens followed by the questions' tokens.
        padding: (B, C), added to the scores of context tokens.
        own: (L, L), added to the scores within a question.
    """
    num_context = padding.shape[1]
    scale = q.shape[-1] ** -0.5
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
    k_context, v_context = k[:, :, :num_context], v[:, :, :num_context]
    context = scaled_dot_product_attention(q[:, :, :num_context], k_context, v_context, is_causal=True)
    asking = q[:, :, num_context:] * scale
    q_own, k_own, v_own = (_unfold(x, num_questions) for x in (asking, k[:, :, num_context:], v[:, :, num_context:]))
    scores_context = asking @ k_context.transpose(-1, -2) + padding[:, None, None]
    scores_own = q_own @ k_own.transpose(-1, -2) + own  # (B, H, Q, L, L)
    weights = torch.cat([scores_context, scores_own.flatten(2, 3)], -1).softmax(-1)
    from_own = _unfold(weights[..., num_context:], num_questions) @ v_own
    questions = weights[..., :num_context] @ v_context + from_own.flatten(2, 3)
    return torch.cat([context, questions], 2).transpose(1, 2)


def _unfold(x: Tensor, num_questions: int) -> Tensor:
    """Reshape (B, H, Q * L, D) to (B, H, Q, L, D)."""
    return x.reshape(*x.shape[:2], num_questions, -1, x.shape[-1])
