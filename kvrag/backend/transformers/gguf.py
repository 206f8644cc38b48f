"""GGUF files in transformers: the header, the tokenizer, and how `generate` processes logits.

transformers' own tokenizers of such files leave out how vocabularies split and merge texts. Here, a file with a setting
that would be lost is refused.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, TokenizersBackend

from kvrag.backend.gguf import find, modelfile
from kvrag.errors import ModelLoadError, UnsupportedModelError, reason_of

logger = logging.getLogger("kvrag")

_FREQS = "rope_freqs.weight"
_GGML, _NORMAL, _UNKNOWN, _CONTROL, _ADDED, _BYTE = "tokenizer.ggml.", 1, 2, 3, 4, 6
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEYS = re.compile(
    r"model|pre|tokens|token_type|scores|merges|add_bos_token|add_space_prefix|(bos|eos|eot|eom|unknown|padding)_token_id"
    r"|eos_token_ids|tokenizer\.chat_template(\.\w+)?"
    # harmless: EOS behind texts to train on; tokens in tasks of code and of BERT; a copy of the tokenizer; names
    r"|add_eos_token|(fim_\w+|prefix|suffix|middle|seperator|cls|mask)_token_id|token_type_count"
    r"|tokenizer\.(huggingface\.json|chat_templates)"
)
"""Keys that a file may have for its tokenizer; any other must be False, or is refused."""

# how a byte-level vocabulary splits texts, one way after the other, besides those that transformers knows
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _WORDS)),
    "default": (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9]{3}"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
}
_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 that leave the white space behind them
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Names with which a word that is a token needs no merges, and BOS is added by default."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer, whatever the metadata says, as in llama.cpp."""

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # Ollama's, that transformers has, too
_ORIGINAL = "use the model's original files"


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file, or of its first shard. Of an array of texts, `metadata` has the length."""

    name: str  # of the model, as it was given
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[str, ...]

    @property
    def own(self) -> dict[str, Any]:
        """The settings of its architecture."""
        start = f"{self.metadata['general.architecture']}."
        return {key.removeprefix(start): value for key, value in self.metadata.items() if key.startswith(start)}

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of a head's keys and values."""
        own = self.own
        usual = own["embedding_length"] // own["attention.head_count"]
        return own.get("attention.key_length", usual), own.get("attention.value_length", usual)

    @property
    def numbers_per_token(self) -> int:
        """Numbers of KV per token, all layers."""
        own = self.own
        heads = own.get("attention.head_count_kv", own["attention.head_count"])
        return (sum(heads) if isinstance(heads, list) else heads * own["block_count"]) * sum(self.dims)


def read_header(name: str) -> Header | None:
    """Read the header of the GGUF file that a model's name stands for; None if it stands for none.

    Raises:
        ModelLoadError: As `find` does, or the header is damaged, or not that of a language model.
    """
    if (path := find(name)) is None:
        return None
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata

        header = Header(name, path, *read_gguf_metadata(str(path)))
        own, size = header.own, header.numbers_per_token
        is_model = own["context_length"] > 0 and 0 < size < 1 << 30
    except ImportError:
        _fail(name, "GGUF files need transformers 5.24: pip install transformers==5.24.0")
    except OSError as error:
        _fail(name, f"{path} cannot be read ({error.strerror})")
    except Exception as error:  # any, of a damaged header
        _fail(name, f"{path.name} is damaged, or no language model: get it again ({reason_of(error)})")
    if not is_model:
        _fail(name, f"{path.name} is damaged: get it again")
    return header


def rope_factors(header: Header) -> torch.Tensor | float:
    """Return the divisors of the RoPE frequencies, such as Llama 3's, (R,) float32; 1.0 without any."""
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict

    if _FREQS not in header.tensors:
        return 1.0
    try:
        return load_gguf_state_dict(GgufHeader.from_file(str(header.path)))[_FREQS][...].double()
    except ValueError as error:  # a quantisation that transformers does not know
        _refuse(header, f"its RoPE factors cannot be read ({reason_of(error)}): use a Q4_K_M or Q8_0 file")


def stand_in(header: Header, tokenizer: Any, vocab_size: int) -> Any:
    """Return a model without weights that has the file's generation config."""
    special = _special_ids(header)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=special.get("bos"),
        pad_token_id=special.get("padding"),
        eos_token_id=sorted({special[name] for name in ("eos", "eot", "eom") if name in special}),
    )
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    set_defaults(header, tokenizer, hf.generation_config)
    return hf


def _refuse(header: Header, hint: str) -> NoReturn:
    raise UnsupportedModelError(f"cannot load model {header.name!r}: {hint}")


def _fail(name: str, hint: str) -> NoReturn:
    raise ModelLoadError(f"cannot load model {name!r}: {hint}") from None


def tokenizer_of(header: Header) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template.

    Raises:
        UnsupportedModelError: It would give other ids than llama.cpp's, or has a setting that would be lost.
        ModelLoadError: The chat template is broken.
    """
    metadata, arrays = header.metadata, [f"{_GGML}tokens", f"{_GGML}merges"]
    part = {key.removeprefix(_GGML): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    for key, value in metadata.items():
        if key.startswith("tokenizer.") and not _KEYS.fullmatch(key.removeprefix(_GGML)) and value is not False:
            _refuse(header, f"its setting {key} would be lost: {_ORIGINAL}")
    from transformers.integrations.gguf.reader import read_gguf_metadata

    texts, _ = read_gguf_metadata(str(header.path), arrays)
    part |= {key.removeprefix(_GGML): texts[key] for key in arrays if key in texts}
    part["tokens"] = tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(part["tokens"])]
    part["vocab"] = {text: number for number, text in enumerate(tokens)}
    part["token_type"] = kinds = part.get("token_type") or [_NORMAL] * len(tokens)
    special, is_spm = {name: tokens[number] for name, number in _special_ids(header).items()}, part["model"] == "llama"
    if part["model"] not in ("llama", "gpt2") or len(part["vocab"]) != len(tokens):
        _refuse(header, f"its tokenizer of the kind {part['model']!r} is not read: {_ORIGINAL}")
    backend = _sentencepiece(header, part, special.get("unknown")) if is_spm else _byte_level(header, part)
    # no metadata say so; llama.cpp goes by the name, of which converters write several
    kind = metadata["general.architecture"] if is_spm else ""
    strips = re.search("phi-?3", f"{metadata.get('general.name')} {kind}".lower()) is not None
    own = {special.get("bos"), special.get("eos"), *_ENDS}  # some files call them normal
    added: dict[str | None, AddedToken] = {
        text: AddedToken(
            text, rstrip=strips and text not in _PLAIN, normalized=False, special=kind != _ADDED or text in own
        )
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _ADDED) or text in own
    }
    backend.add_tokens([*added.values()])
    template = part.get("tokenizer.chat_template")
    named = {key[24:]: text for key, text in part.items() if key.startswith("tokenizer.chat_template.")}
    hf = TokenizersBackend(
        tokenizer_object=backend,
        model_max_length=header.own["context_length"],
        chat_template={"default": template, **named} if template and named else template,
        add_bos_token=part.get("add_bos_token", is_spm or part.get("pre") in _LLAMA3),
        **{role: added.get(special.get(name)) for role, name in _ROLES.items()},
    )
    if hf.chat_template is not None:
        _check_template(header, hf)
    return hf


def _special_ids(header: Header) -> dict[str, int]:
    """Return the ids of special tokens by name. One outside the vocabulary is ignored, as by llama.cpp."""
    ids = {"bos": 1, "eos": 2, "unknown": 0} if header.metadata.get(f"{_GGML}model") == "llama" else {}
    size = header.metadata.get(f"{_GGML}tokens", 0)
    for key, number in header.metadata.items():
        if key.startswith(_GGML) and key.endswith("_token_id") and 0 <= number < size:
            ids[key.removeprefix(_GGML).removesuffix("_token_id")] = number
    return {name: number for name, number in ids.items() if number < size}


def _sentencepiece(header: Header, part: dict[str, Any], unknown: str | None) -> Backend:
    """Return a tokenizer that joins neighbours to the token with the best score."""
    tokens, kinds, vocab = part["tokens"], part["token_type"], part["vocab"]
    scores = part.get("scores") or [0.0] * len(tokens)
    found = [
        (number, text[:cut], text[cut:])
        for text, number in vocab.items()
        if kinds[number] not in (_UNKNOWN, _CONTROL, _BYTE)
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    found.sort(key=lambda merge: (-scores[merge[0]], -len(merge[1])))
    merges = [(left, right) for _, left, right in found]
    if "merges" in part and len({scores[number] for number, *_ in found if kinds[number] == _NORMAL}) == 1:
        merges, found = _pairs(part["merges"]), []  # the scores are placeholders
    first: dict[tuple[float, str], int] = {}
    for rank, (number, left, _) in enumerate(found):
        first.setdefault((scores[number], left), rank)
    for rank, (number, _, right) in enumerate(found):
        other, _, _ = found[min(rank, first.get((scores[number], right), rank))]
        # of equal neighbours, the first in a text goes first, as no ranks can say; runs of one character come out right
        if other != number and len({*tokens[number], *tokens[other]}) > 1:
            both = f"{tokens[number]!r} and {tokens[other]!r}"
            _refuse(header, f"{both} of its tokenizer overlap and have the same score: {_ORIGINAL}")
    backend = Backend(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before: list[Any] = [normalizers.Replace(" ", "\u2581")]
    after: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if part.get("add_space_prefix", True):
        before, after = [normalizers.Prepend("\u2581"), *before], [*after, decoders.Strip(" ", 1, 0)]
    backend.normalizer, backend.decoder = normalizers.Sequence(before), decoders.Sequence(after)
    return backend


def _byte_level(header: Header, part: dict[str, Any]) -> Backend:
    """Return a tokenizer that joins the bytes of words in the order of the merges."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    way = part.get("pre", "default")
    split = GGUF_PRE_TOKENIZER_SPLITS.get("qwen2" if way == "stablelm2" else way)
    if split is None and way not in _SPLITS:
        _refuse(header, f"how its tokenizer {way!r} splits texts is unknown: {_ORIGINAL}")
    backend = Backend(BPE(part["vocab"], _pairs(part["merges"]), ignore_merges=way in _LLAMA3))
    words = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS.get(way, (split,))]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    return [(merge[:at], merge[at + 1 :]) for merge in merges for at in (merge.index(" ", 1),)]


def set_defaults(header: Header, hf: Any, generation: Any) -> None:
    """Set on tokenizer and generation config what ends answers, and what Ollama's model adds; log the rest of it."""
    layers, listed = modelfile(header.name), header.metadata.get(f"{_GGML}eos_token_ids", ())
    options = json.loads(layers.pop("params", "{}"))
    hf.default_system, hf.default_stop = hf.chat_template and layers.pop("system", ""), tuple(options.pop("stop", ()))
    ends = {hf.backend_tokenizer.token_to_id(text) for text in (*_ENDS, *hf.default_stop)} - {None}
    generation.eos_token_id = sorted({*ends, *(generation.eos_token_id or ()), *listed})
    given = {key.replace("repeat", "repetition"): options.pop(key) for key in _OPTIONS if key in options}
    if "temperature" in given:
        given |= {"do_sample": given["temperature"] > 0, "temperature": given["temperature"] or None}
    generation.update(**given)
    if left := [*(kind.upper() for kind, text in layers.items() if text != hf.chat_template), *options]:
        said = "%s: of its Modelfile, not applied: %s; a chat template is read from its GGUF file only"
        logger.warning(said, header.name, ", ".join(left))


def _check_template(header: Header, hf: Any) -> None:
    repair = "`gguf-new-metadata --chat-template-file` writes another one into a copy"
    try:
        text = hf.apply_chat_template([{"role": "user", "content": "kvrag"}], tokenize=False)
    except Exception as error:  # of jinja2, of the template, of Python
        reason = f"its chat template is broken ({reason_of(error)})"
        raise ModelLoadError(f"cannot load model {header.name!r}: {reason}: {repair}") from error
    if "kvrag" not in text:
        raise ModelLoadError(f"cannot load model {header.name!r}: its chat template leaves out the question: {repair}")
