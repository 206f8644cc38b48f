"""The two kinds of servers: their names of the settings, and the places of their reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvrag.client.answer import report_of
from kvrag.client.connection import Body, Connection
from kvrag.client.texts import NamedTexts, batches, prompt_of, whole_documents
from kvrag.config import Grammar, Sampling
from kvrag.errors import (
    ContextWindowError,
    KvragError,
    PromptError,
    ServerError,
    SettingError,
    StoreFullError,
    StoreReadOnlyError,
)
from kvrag.types import BlendReport, Messages, WarmReport

_REQUEST_BYTES = 256 << 10  # of texts per request: a few minutes of work at most on a slow server

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt and the settings of its answer, as in `BlendEngine.stream`."""

    prompt: str | Messages
    sampling: Sampling
    documents: Sequence[str]
    namespace: str
    blend: Body
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    grammar: Grammar | None
    template: Body
    timeout: float | None = None

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a tool call."""
        return self.tool_choice not in (None, "auto", "none")


class KvragServe:
    """`kvrag serve`: reports come with the answers, and namespaces with the API key.

    Attributes:
        model: Name of the model in requests.
        window: Size of its context window in tokens.
        has_chat_template: True if it answers messages.
    """

    def __init__(self, connection: Connection, entry: Body) -> None:
        """Read a model's entry in `/v1/models`."""
        self._connection, self.model = connection, str(entry["id"])
        if "max_model_len" not in entry:
            raise ServerError(f"{self.model} of {connection.root} only embeds: choose a model that answers")
        self.window = int(entry["max_model_len"])
        self.has_chat_template = bool(entry.get("has_chat_template", True))

    def request(self, question: AnswerRequest, tag: str) -> Body:
        """Return the arguments of the SDK's `create`; `tag` names a streamed answer, "" = not streamed."""
        self._check(question.namespace)
        grammar = question.grammar
        if grammar is not None and grammar.json_schema is None:
            raise SettingError("kvrag serve supports grammars as a json_schema only: convert this one")
        extra: Body = {**question.blend, "chunks": list(question.documents)}
        return _request(self.model, question, bool(tag), extra)

    def report(self, extras: Body, usage: Body, tag: str) -> BlendReport:
        """Return the report of a complete answer from its responses' extra fields and usage."""
        return report_of(extras.get("kvrag"), usage, "the server sent no report")

    def warm(self, texts: NamedTexts, document: str | None, namespace: str, progress: Progress) -> Iterator[WarmReport]:
        """Encode texts; yield a report per request. `document` names the document of all texts; None = `texts` does."""
        self._check(namespace)
        done = 0
        for part in whole_documents(texts, _REQUEST_BYTES):
            body = {
                "texts": part.texts,
                "document": part.documents if document is None else document,
                "sources": part.sources,
            }
            yield _warm_report(self._connection.call("POST", "/v1/chunks", body), self._connection)
            progress(done := done + len(part), len(texts))

    def forget(self, document: str, namespace: str) -> int:
        """See `BlendEngine.forget`."""
        self._check(namespace)
        # dots as well: "a/../b" would be shortened on the way
        path = quote(document, safe="").replace(".", "%2E")
        return int(self._connection.call("DELETE", f"/v1/chunks/{path}")["removed"])

    def documents(self, prefix: str, namespace: str) -> list[str]:
        """See `BlendEngine.documents`."""
        self._check(namespace)
        return list(self._connection.call("GET", "/v1/chunks", params={"prefix": prefix})["documents"])

    def _check(self, namespace: str) -> None:
        if namespace:
            raise SettingError(
                f"kvrag serve takes the namespace from the API key: leave out namespace={namespace!r}, and pass the "
                "key of that namespace as api_key="
            )


class Vllm:
    """vLLM with kvrag's KV connector, which has no endpoints: everything goes through `kv_transfer_params`.

    Texts are encoded by completions whose prompts contain them, because the connector needs pages for their KV.
    Attributes are those of `KvragServe`.
    """

    def __init__(self, connection: Connection, entry: Body) -> None:
        """Read a model's entry in `/v1/models`, and ask for its context window."""
        self._connection, self.model = connection, str(entry["id"])
        self.has_chat_template = True
        body = {"model": self.model, "messages": [{"role": "user", "content": "a"}]}
        try:
            probed = connection.call("POST", "/tokenize", body)
        except PromptError:
            self.has_chat_template = False
            probed = connection.call("POST", "/tokenize", {"model": self.model, "prompt": "a"})
        except ServerError as error:
            if error.status != 404:  # a gateway may hide this endpoint
                raise
            probed = {}
        window = entry.get("max_model_len") or probed.get("max_model_len")
        if not window:
            raise ServerError(f"{connection.root} does not name the window of {self.model}: update vLLM")
        self.window = int(window)

    def request(self, question: AnswerRequest, tag: str) -> Body:
        """See `KvragServe.request`."""
        if question.documents:
            texts = NamedTexts.of(question.documents, "", None)
            for _ in self.warm(texts, "", question.namespace, lambda done, total: None):
                pass
        blend = {**question.blend, "namespace": question.namespace, "tag": tag}
        extra: Body = {"kv_transfer_params": {"kvrag": {"mode": "blend", **_without_empty(blend)}}}
        grammar = question.grammar
        if grammar is not None and grammar.json_schema is None:
            is_lark = grammar.regex is None
            extra["structured_outputs"] = {"grammar": grammar.lark} if is_lark else {"regex": grammar.regex}
        request = _request(self.model, question, bool(tag), extra)
        return {**request, "max_tokens": self._room(request)}

    def report(self, extras: Body, usage: Body, tag: str) -> BlendReport:
        """See `KvragServe.report`."""
        missing = f"{self._connection.root} sent no report: start vLLM with kvrag's KV connector"
        content = (extras.get("kv_transfer_params") or {}).get("kvrag")
        if content is None and tag:  # vLLM sends it with complete answers only
            try:
                content = self._control({"mode": "report", "tag": tag})
            except KvragError as error:  # the answer is complete, and must not be lost
                missing = f"no report: {error}"
        return report_of(content, usage, missing)

    def warm(self, texts: NamedTexts, document: str | None, namespace: str, progress: Progress) -> Iterator[WarmReport]:
        """See `KvragServe.warm`."""
        if not len(texts):  # the connector cannot encode nothing
            if document:
                self.forget(document, namespace)
            yield WarmReport(chunks=0, tokens=0, bytes=0, new=0, reused=0, skipped=0, seconds=0.0)
            return
        divided = batches(texts, self.window, self._count)
        if len(divided) == 1:
            yield self._warm(texts, document, {"namespace": namespace}, prompt_of(texts))[0]
            progress(len(texts), len(texts))
            return
        done, contexts = 0, dict[str, list[int]]()
        for batch in divided:
            known = {name: contexts[name] for name in {*batch.part.sources} if name in contexts}
            options = {"namespace": namespace, "contexts": known, "replace": batch.is_whole}
            # the prompt's pages must hold the contexts and the texts encoded after them: reserve the whole window
            prompt = [0] * (self.window - 1) if known else prompt_of(batch.part)
            report, new_contexts = self._warm(batch.part, document, options, prompt)
            contexts |= new_contexts
            yield report
            progress(done := done + len(batch.part), len(texts))
        # the earlier version of a divided document is replaced last: what both have in common is not encoded again
        if names := {name for batch in divided if not batch.is_whole for name in batch.part.documents} - {""}:
            self._warm(texts.of_documents(names), None, {"namespace": namespace}, prompt_of(divided[0].part))

    def _warm(
        self, texts: NamedTexts, document: str | None, options: Body, prompt: str | list[int]
    ) -> tuple[WarmReport, dict[str, list[int]]]:
        """Send one request; return its report, and the token ids that precede the next text of each source."""
        names = texts.documents if document is None else document
        request = {"mode": "warm", "texts": texts.texts, "document": names, "sources": texts.sources, **options}
        content = self._control(request, prompt)
        return _warm_report(content, self._connection), content.get("contexts") or {}

    def forget(self, document: str, namespace: str) -> int:
        """See `KvragServe.forget`."""
        request = {"mode": "forget", "document": document, "namespace": namespace}
        return int(self._control(request).get("forgotten") or 0)

    def documents(self, prefix: str, namespace: str) -> list[str]:
        """See `KvragServe.documents`."""
        request = {"mode": "documents", "prefix": prefix, "namespace": namespace}
        return list(self._control(request).get("documents") or ())

    def _room(self, request: Body) -> int:
        """Return the maximum length of the answer that fits: vLLM refuses prompts with longer ones."""
        max_tokens = int(request["max_tokens"])
        prompt: Body = {name: request[name] for name in ("prompt", "messages", "tools") if name in request}
        # a token has at least one byte; tools and messages are surrounded by a template's own text
        template = 0 if "prompt" in prompt else 1000 + 20 * len(prompt["messages"])
        num_bytes = len(json.dumps(prompt, ensure_ascii=False).encode(errors="surrogatepass"))
        if num_bytes + template + max_tokens <= self.window:
            return max_tokens
        if kwargs := request["extra_body"].get("chat_template_kwargs"):
            prompt["chat_template_kwargs"] = kwargs
        room = self.window - self._tokenize(prompt)
        return min(max_tokens, room) if room > 0 else max_tokens  # vLLM describes the error

    def _count(self, prompt: str) -> int:
        return self._tokenize({"prompt": prompt})

    def _tokenize(self, prompt: Body) -> int:
        return int(self._connection.call("POST", "/tokenize", {"model": self.model, **prompt})["count"])

    def _control(self, command: Body, prompt: str | list[int] = " ") -> Body:
        """Send a request to the connector, on a prompt that reserves its pages; return the connector's response."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        extra = {"kv_transfer_params": {"kvrag": command}}
        response = self._connection.answer({**request, "extra_body": extra})
        content = (response.get("kv_transfer_params") or {}).get("kvrag")
        if not isinstance(content, dict):
            raise ServerError(
                f"vLLM at {self._connection.root} has no KV connector of kvrag: start it with --kv-transfer-config"
            )
        if "error" in content:
            raise _ERRORS.get(str(content.get("type")), ServerError)(str(content["error"]))
        if (ignored := content.get("ignored")) and command["mode"] != "report":  # a report lists those of its answer
            raise SettingError("; ".join(map(str, ignored)))
        return content


Server = KvragServe | Vllm

_ERRORS: dict[str, type[KvragError]] = {
    kind.__name__: kind for kind in (ContextWindowError, PromptError, SettingError, StoreFullError, StoreReadOnlyError)
}


def _request(model: str, question: AnswerRequest, is_stream: bool, extra: Body) -> Body:
    """Return the arguments of both kinds of servers; `extra` are those that OpenAI does not have."""
    sampling, grammar, prompt = question.sampling, question.grammar, question.prompt
    is_text = isinstance(prompt, str)
    if is_text and question.tools:
        raise PromptError("tools need a chat prompt: pass the prompt as a list of messages")
    if isinstance(prompt, str) and not prompt.strip():
        raise PromptError("the prompt is empty")
    request: Body = {"prompt": prompt} if is_text else {"messages": messages_of(prompt)}
    seed = sampling.seed
    if seed is not None and seed >= 1 << 63:
        seed -= 1 << 64  # servers take signed numbers
    request |= {
        "model": model,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token): value for token, value in (sampling.logit_bias or {}).items()},
        "seed": seed,
        "stop": list(sampling.stop),
        "tools": list(question.tools),
        "tool_choice": _choice(question.tool_choice),
    }
    if is_stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    extra |= {"top_k": sampling.top_k, "repetition_penalty": sampling.repetition_penalty}
    if grammar is not None and grammar.json_schema is not None:
        schema = {"name": "answer", "schema": dict(grammar.json_schema)}
        extra["response_format"] = {"type": "json_schema", "json_schema": schema}
    if not is_text:
        extra["chat_template_kwargs"] = question.template
    return {**_without_empty(request), "extra_body": _without_empty(extra)}


def _without_empty(settings: Body) -> Body:
    return {name: value for name, value in settings.items() if value is not None and value not in ("", [], {})}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, str) or choice in ("auto", "none", "required"):
        return choice
    return "required" if choice == "any" else {"type": "function", "function": {"name": choice}}


def messages_of(messages: Any) -> Messages:
    """Return messages for chat templates in OpenAI's form, in which arguments of tool calls are JSON texts.

    Raises:
        PromptError: These are no messages.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise PromptError(f"a prompt must be one string or a list of messages, got {messages!r:.80}")
    if not messages:
        raise PromptError("the prompt is empty: pass at least one message")
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> Body:
    converted = dict(message)
    if isinstance(content := message.get("content"), list):
        converted["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [_call(call) for call in calls]
    return converted


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call  # the server refuses what is malformed
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _warm_report(content: Any, connection: Connection) -> WarmReport:
    try:
        return WarmReport.from_dict(content)
    except (AttributeError, TypeError):
        raise ServerError(f"{connection.root} sent no valid report of the encoding: update the server") from None
