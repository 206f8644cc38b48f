"""GGUF files in transformers: the header, and llama.cpp's tokenizer with a chat template."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, LlamaConfig, PythonBackend

from kvrag.backend.hub import find, refuse
from kvrag.backend.llama.library import Loaded, load
from kvrag.errors import ModelLoadError, reason_of

_UNKNOWN, _CONTROL, _ADDED = 1, 8, 16  # attributes of tokens
_SENTENCEPIECE = 1  # a type of vocabulary


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
        refuse(name, "GGUF files need transformers 5.24: pip install transformers==5.24.0")
    except OSError as error:
        refuse(name, f"{path} cannot be read ({error.strerror})")
    except Exception as error:  # any, of a damaged header
        refuse(name, f"{path.name} is damaged, no language model, or not its first shard ({reason_of(error)})")
    if not is_model:
        refuse(name, f"{path.name} is damaged: get it again")
    return header


def stand_in(tokenizer: FileTokenizer, vocab_size: int) -> Any:
    """Return a model without weights that has the file's generation config."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.ends,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tokenizer_of(header: Header, model: Loaded | None = None) -> FileTokenizer:
    """Return the tokenizer of a GGUF file, with its chat template; without its `model`, the vocabulary is loaded.

    Raises:
        ModelLoadError: The vocabulary cannot be read, or the chat template is broken.
    """
    hf = FileTokenizer(header, model or load(header.name, header.path, vocab_only=True))
    if hf.chat_template is None:
        return hf
    repair = "`gguf-new-metadata --chat-template-file` writes another one into a copy"
    try:
        text = hf.apply_chat_template([{"role": "user", "content": "kvrag"}], tokenize=False)
    except Exception as error:  # of jinja2, of the template, of Python
        reason = f"its chat template is broken ({reason_of(error)})"
        raise ModelLoadError(f"cannot load model {header.name!r}: {reason}: {repair}") from error
    if "kvrag" not in text:
        refuse(header.name, f"its chat template leaves out the question: {repair}")
    return hf


class FileTokenizer(PythonBackend):  # type: ignore[misc]
    """llama.cpp's tokenizer of a file.

    Attributes:
        ends: Ids of the tokens that end an answer.
        vocabulary: Pointer to llama.cpp's.
    """

    def __init__(self, header: Header, model: Loaded) -> None:
        """Read the vocabulary of a loaded file."""
        self._model, self._lib = model, model.library.functions  # the model owns the vocabulary
        self.vocabulary = model.vocabulary
        lib, vocabulary, numbers = self._lib, self.vocabulary, range(model.num_vocab)
        self._texts = [
            lib.llama_vocab_get_text(vocabulary, number).decode(errors="backslashreplace") for number in numbers
        ]
        self._numbers = dict(zip(self._texts, numbers, strict=True))
        kinds = [lib.llama_vocab_get_attr(vocabulary, number) for number in numbers]
        self.ends = [number for number in numbers if lib.llama_vocab_is_eog(vocabulary, number)]
        self._added_tokens_decoder = added = {
            number: AddedToken(text, normalized=False, special=not kind & _ADDED)
            for number, text, kind in zip(numbers, self._texts, kinds, strict=True)
            if kind & (_UNKNOWN | _CONTROL | _ADDED)
        }
        is_spm = lib.llama_vocab_type(vocabulary) == _SENTENCEPIECE
        if is_spm and not {f"<0x{byte:02X}>" for byte in range(256)} <= self._numbers.keys():
            refuse(header.name, "its vocabulary has no tokens for bytes, without which llama.cpp aborts on some texts")
        self._begins_with_space = is_spm and header.metadata.get("tokenizer.ggml.add_space_prefix", True)
        template = header.metadata.get("tokenizer.chat_template")
        named = {key[24:]: text for key, text in header.metadata.items() if key.startswith("tokenizer.chat_template.")}
        roles = {role: added.get(getattr(lib, f"llama_vocab_{role}")(vocabulary)) for role in ("bos", "eos", "pad")}
        super().__init__(
            model_max_length=header.own["context_length"],
            chat_template={"default": template, **named} if template and named else template,
            special_tokens_pattern="bos" if roles["bos"] and lib.llama_vocab_get_add_bos(vocabulary) else "none",
            **{f"{role}_token": token for role, token in roles.items()},
        )

    def parts(self) -> dict[str, Any]:
        """Return what llguidance needs of it; tokens that are no text begin with 0xff."""
        added = self._added_tokens_decoder.items()
        marks = {n for n, token in added if token.special or token.content[0] + token.content[-1] == "<>"}
        return {
            "tokens": [b"\xff" * (number in marks) + self._piece(number) for number in range(self.vocab_size)],
            "vocab_ptr": self.vocabulary,
            "tokenize_fptr": ctypes.cast(self._lib.llama_tokenize, c_void_p).value,
        }

    def _piece(self, number: int) -> bytes:
        """Return the bytes of a token."""
        room = ctypes.create_string_buffer(4 * len(self._texts[number].encode()) + 16)
        size = self._lib.llama_token_to_piece(self.vocabulary, number, room, len(room), 0, True)
        return room.raw[:size]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._texts)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens."""
        return self._numbers

    def tokenize(self, text: str, split_special_tokens: bool = False, **_: Any) -> list[str]:
        """Return the tokens of a text."""
        data = text.encode()
        found = (c_int32 * (len(data) + 8))()
        options = (False, not split_special_tokens)
        while (size := self._lib.llama_tokenize(self.vocabulary, data, len(data), found, len(found), *options)) < 0:
            found = (c_int32 * -size)()
        return [self._texts[number] for number in found[:size]]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._numbers.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._texts[index]

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        added = self._added_tokens_decoder
        shown = [n for n in ids if not (skip_special_tokens and n in added and added[n].special)]
        text = b"".join(map(self._piece, shown)).decode(errors="replace")
        return text.removeprefix(" ") if self._begins_with_space else text
