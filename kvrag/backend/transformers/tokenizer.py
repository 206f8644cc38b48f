"""Text to ids and back, exactly as the plain model does it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import xxhash
from tokenizers.decoders import DecodeStream
from transformers import TokenizersBackend

from kvrag.backend.transformers.control_tokens import apply_chat_template
from kvrag.errors import PromptError
from kvrag.types import Messages

_LONGEST_CHARACTER = 8  # tokens: four bytes, and room for tokens without text
_PREAMBLE_TOKENS = 8  # enough for a sink; longer ones would run into what changes, such as a template's date

# transformers warns about texts longer than the window that are only counted; check_window refuses long prompts
logging.getLogger("transformers.tokenization_utils_base").addFilter(
    lambda record: "sequence length is longer than" not in record.getMessage()
)


class Tokenizer:
    """A transformers tokenizer with the rules that reuse depends on.

    Attributes:
        preamble: Token ids that every chunk is encoded behind: what the chat template puts before everything, or BOS.
            Without it a chunk's first tokens would become an attention sink that no stitched prompt has.
            Empty if it is not wanted.
    """

    def __init__(self, hf: Any, model_name: str, preamble: bool = True) -> None:
        self.hf, self._name = hf, model_name
        self._lock = threading.Lock()  # whether control tokens are text is kept in the tokenizer: one thread at a time
        self._renders_tools: dict[str, bool] = {}
        self.preamble = self._find_preamble() if preamble else ()

    def as_prompt(self, text: str) -> str | Messages:
        """Return a text as one user message, or unchanged if the model has no chat template."""
        return [{"role": "user", "content": text}] if self.has_chat_template else text

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self.hf.chat_template is not None

    def render(self, prompt: str | Messages, **template: Any) -> list[int]:
        """Return prompt ids, tokenised once.

        A string is taken as it is, with the tokenizer's own BOS. Messages go through the chat template, which writes
        all control tokens itself: those that appear in a message stay text. `template` is passed on to it. If it
        refuses them, it is tried on the same text in fewer messages: consecutive messages of one role joined, then the
        system message at the head of the first user message.

        Raises:
            PromptError: Nothing to answer, text that cannot be encoded, content other than text, or messages that the
                template refuses.
        """
        if isinstance(prompt, str):
            _check_text(prompt)
            if not prompt.strip():
                raise PromptError("the prompt is empty")
            with self._lock:
                ids = list(self.hf(prompt)["input_ids"])
            if not ids:
                raise PromptError("the prompt is empty: nothing is left of it after tokenisation")
            return ids
        if not isinstance(prompt, (list, tuple)):
            raise PromptError(f"a prompt is one string or a list of messages, got {prompt!r:.80}")
        messages = [_checked(message) for message in prompt]
        if not messages:
            raise PromptError("the prompt is empty: no messages")
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            raise PromptError("the prompt is empty: no message has content")
        refusal: PromptError | None = None
        for attempt in _variants(messages):
            try:
                return self._apply_template(attempt, template)
            except PromptError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def generation_prompt_length(self, **template: Any) -> int:
        """Return the length of the generation prompt: tokens that end a prompt and are absent from a history."""
        messages = [{"role": "user", "content": "a"}]
        try:
            with_prompt, without = (self._apply_template(messages, template, prompt) for prompt in (True, False))
        except PromptError:
            return 0  # unknown: the template rejects a single message
        common = takewhile(lambda pair: pair[0] == pair[1], zip(with_prompt, without, strict=False))
        return len(with_prompt) - len(list(common))

    def _apply_template(self, messages: Messages, template: Mapping[str, Any], prompt: bool = True) -> list[int]:
        if self.hf.chat_template is None:
            raise PromptError(f"{self._name} has no chat template: pass the prompt as one string")
        try:
            with self._lock:
                return apply_chat_template(self.hf, messages, add_generation_prompt=prompt, **template)
        except Exception as error:  # jinja2 errors, the template's own refusals, TypeErrors
            raise PromptError(f"the chat template of {self._name} refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a chunk's text alone: no BOS, and control tokens in it stay text.

        Raises:
            PromptError: The text cannot be encoded.
        """
        _check_text(text)
        with self._lock:
            return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int], control_tokens: bool = False) -> str:
        """Return the text of generated ids, with or without the control tokens among them."""
        text = self.hf.decode(ids, skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def stream(self, control_tokens: bool = False) -> TextStream:
        """Return an incremental `decode`, for the tokens of one answer."""
        return TextStream(self.hf, control_tokens)

    def control_token(self, text: str) -> int | None:
        """Return the id of the control token of this name, if there is one."""
        return next((number for number, name in _control_tokens(self.hf).items() if name == text), None)

    def template_text(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the source of the chat template for prompts with these tools, or ""."""
        return str(self.hf.get_chat_template(tools=tools)) if self.has_chat_template else ""

    def renders_tools(self) -> bool:
        """Whether the chat template renders tools; some name them differently or only render calls in the history."""
        source = self.template_text([{}])  # which may be another one than without tools
        if source not in self._renders_tools:  # asked for every prompt
            self._renders_tools[source] = self._ask_template()
        return self._renders_tools[source]

    def _ask_template(self) -> bool:
        probe = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
        try:
            with self._lock:
                text = self.hf.apply_chat_template([{"role": "user", "content": ""}], tools=[probe], tokenize=False)
        except Exception:  # of any kind; rendering the prompt will raise it again
            return False
        return "probe" in text

    @property
    def has_response_parser(self) -> bool:
        """Whether the tokenizer has a response template, which describes the model's answers."""
        return getattr(self.hf, "response_template", None) is not None

    def response_parser(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Return transformers' own parser of an answer to this prompt; it needs the control tokens in the text."""
        return self.hf.get_response_parser(prefix=self.decode(ids, control_tokens=True), tools=list(tools))

    @property
    def digest(self) -> str:
        """Hash of what turns text into ids."""
        backend = getattr(self.hf, "backend_tokenizer", None) or getattr(self.hf, "_tokenizer", None)
        state = backend.to_str() if backend is not None else repr(sorted(self.hf.get_vocab().items()))
        # what stands before are the truncation and padding of the last call
        state = state[max(state.find('"added_tokens"'), 0) :]
        return xxhash.xxh3_128(state.encode()).hexdigest()

    def _find_preamble(self) -> tuple[int, ...]:
        user, system = {"role": "user"}, {"role": "system"}
        prompts = []
        if self.hf.chat_template is not None:
            for messages in (
                [{**user, "content": "One."}],
                [{**user, "content": "two"}],
                [{**system, "content": "Three!"}, {**user, "content": "four"}],
                [{**system, "content": "five"}, {**user, "content": "Six"}],
            ):
                try:
                    prompts.append(self._apply_template(messages, {}))
                except PromptError:
                    continue  # this template refuses a system message
        if len(prompts) > 1:
            common = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))]
            if common:
                return tuple(common[:_PREAMBLE_TOKENS])
        bos = self.hf.bos_token_id
        if bos is not None and self.hf("a")["input_ids"][:1] == [bos]:
            return (bos,)
        return tuple(self.hf.encode("\n", add_special_tokens=False)[:1])


class TextStream:
    """Text of one answer, token by token, as `Tokenizer.decode` gives it for all of them at once.

    A token is decoded together with those of the piece before it, never with the whole answer.
    """

    def __init__(self, hf: Any, control_tokens: bool = False) -> None:
        self._hf, self._skip = hf, not control_tokens
        self._skipped = _control_tokens(hf) if self._skip else {}
        # slow tokenizers have no backend, and some fast ones decode in their own way
        is_plain = isinstance(hf, TokenizersBackend) and type(hf)._decode is TokenizersBackend._decode
        self._fast = DecodeStream(skip_special_tokens=self._skip) if is_plain else None
        self._shown: list[int] = []  # tokens of the last piece: whether a space comes next depends on them
        self._pending: list[int] = []  # tokens that have not become text yet

    def push(self, token: int) -> str:
        """Add a token, return the text that is now complete: whole characters."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        if text := self._next(token):
            self._shown, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """Return the text of what is incomplete; for the end of the answer."""
        before = self._decode(self._shown)
        return self._decode([*self._shown, *self._pending])[len(before) :]

    def _next(self, token: int) -> str:
        if self._fast is not None and len(self._pending) < _LONGEST_CHARACTER:
            try:
                return self._fast.step(self._hf.backend_tokenizer, token) or ""
            except Exception:  # "Invalid prefix": bytes that are not UTF-8 changed the text before them
                pass
        self._fast = None  # it would decode a longer and longer run of invalid bytes, or fail for good
        text = self.rest()
        is_complete = not text.endswith("\ufffd") or len(self._pending) >= _LONGEST_CHARACTER
        return text if is_complete else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._hf.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))


def _control_tokens(hf: Any) -> dict[int, str]:
    return {
        int(number): token.content for number, token in getattr(hf, "added_tokens_decoder", {}).items() if token.special
    }


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, or without any."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message is a dict with role and content, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
        message = {**message, "content": content}
    if content is not None:
        if not isinstance(content, str):
            raise PromptError(f"content must be text, got {content!r:.80}")
        _check_text(content)
    return message


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise PromptError(f"only text can be answered, and a message has content of type {kind!r}")


def _variants(messages: Messages) -> Iterator[Messages]:
    """The messages, then with alternating roles, then without a system message, for templates that require it."""
    yield messages
    joined = _join_neighbours(messages)
    if joined != messages:
        yield joined
    folded = _join_neighbours(_fold_system(messages))
    if folded != joined:
        yield folded


def _join_neighbours(messages: Messages) -> Messages:
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else {}
        # results of tools and calls of them belong to an id of their own
        if set(message) == set(last) == {"role", "content"} and message["role"] == last["role"] != "tool":
            joined[-1] = {**last, "content": _paragraphs(last["content"], message["content"])}
        else:
            joined.append(message)
    return joined


def _fold_system(messages: Messages) -> Messages:
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system:
        return messages
    for number, message in enumerate(others):
        if message["role"] == "user":
            others[number] = {**message, "content": _paragraphs(*system, message.get("content"))}
            return others
    return [{"role": "user", "content": _paragraphs(*system)}, *others]


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate at character {error.start}; "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from None
