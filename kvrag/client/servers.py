"""The two kinds of servers: where each takes settings and chunks, and where it reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote

from kvrag.client.connection import Body, Connection
from kvrag.client.wire import body_of, report_of
from kvrag.config import NamedText, blend_of, check_namespace, named_texts
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

_PROMPT = ("prompt", "messages", "tools", "chat_template_kwargs")  # fields that the number of its tokens depends on

_LONGEST_TOKEN = 16  # bytes; a longer prompt does not fit for sure
_CHUNK = re.compile(r"\A((?:skipped: )?chunk )(\d+)")  # the beginning of a message about a chunk

_ERRORS: dict[str, type[KvragError]] = {
    kind.__name__: kind for kind in (ContextWindowError, PromptError, SettingError, StoreFullError, StoreReadOnlyError)
}


@dataclass(frozen=True)
class _ServedModel:
    connection: Connection
    name: str
    window: int  # tokens
    has_chat_template: bool

    async def tokenize(self, prompt: Body) -> list[int]:
        response = await self.connection.send("post", "/tokenize", body={"model": self.name, **prompt})
        if not isinstance(response.get("tokens"), list):
            raise self.connection.not_a_server()
        return list(response["tokens"])


class KvragServe(_ServedModel):
    """A model of `kvrag serve`: reports come with the answers, and namespaces with the API key."""

    part_bytes = 256 << 10

    async def command(self, name: str, namespace: str, **arguments: Any) -> Body:
        """Carry out "warm", "forget" or "documents", with arguments of the method of `BlendEngine`."""
        _check_no_namespace(namespace)
        if name == "warm":
            return await self.connection.send("post", "/v1/chunks", body=arguments)
        if name == "documents":
            return await self.connection.send("get", "/v1/chunks", options={"params": arguments})
        # dots as well: "a/../b" would be shortened on the way
        path = quote(arguments["document"], safe="").replace(".", "%2E")
        return await self.connection.send("delete", f"/v1/chunks/{path}")

    async def body(self, prompt: str | Messages, options: Body, tag: str) -> Body:
        """Return the JSON of a request; `tag` names a streamed answer, "" = not streamed."""
        _check_no_namespace(options["namespace"])
        if options["grammar"] is not None and options["grammar"].json_schema is None:
            raise SettingError("kvrag serve supports grammars as a json_schema only: convert this one")
        body = body_of(self.name, prompt, options, bool(tag)) | blend_of(options)
        if options["reasoning"] is False and "messages" in body:
            body["reasoning_effort"] = "none"  # also switches templates with another name for it
        return body | {"chunks": options["documents"]} if options["documents"] else body

    async def report(self, extras: Body, usage: Body, tag: str) -> BlendReport:
        """Return the report of a complete answer from its responses' extra fields and usage."""
        return report_of(extras.get("kvrag"), usage, "the server sent no report")


class _Vllm(_ServedModel):
    """A model of vLLM with kvrag's KV connector, which has no endpoints: everything goes through `kv_transfer_params`.

    Texts are encoded by completions whose prompts contain them, because the connector needs pages for their KV.
    """

    @property
    def part_bytes(self) -> int:
        """About as many bytes as the window has room for."""
        return 3 * self.window

    async def command(self, name: str, namespace: str, **arguments: Any) -> Body:
        joined = "\n\n".join(arguments.get("texts", ())) or " "  # vLLM refuses an empty prompt
        # a token has at least one byte; 4 are for control tokens and the answer
        size = num_bytes(joined) + 4
        fits = size <= self.window
        if not fits and size <= _LONGEST_TOKEN * self.window:
            fits = len(await self.tokenize({"prompt": joined})) < self.window
        # texts are encoded one by one: the whole window has room for any of them and its context
        prompt = joined if fits else [0] * (self.window - 1)
        return await self._ask({"mode": name, **arguments, "namespace": namespace}, prompt)

    async def body(self, prompt: str | Messages, options: Body, tag: str) -> Body:
        namespace, grammar = options["namespace"], options["grammar"]
        await warm(self, options["documents"], namespace=namespace)
        body = body_of(self.name, prompt, options, bool(tag))
        params = {"mode": "blend", **blend_of(options), "namespace": namespace, "tag": tag}
        body["kv_transfer_params"] = {"kvrag": {name: value for name, value in params.items() if value != ""}}
        if grammar is not None and grammar.json_schema is None:
            is_lark = grammar.regex is None
            body["structured_outputs"] = {"grammar": grammar.lark} if is_lark else {"regex": grammar.regex}
        return body | {"max_tokens": await self._room(body)}

    async def report(self, extras: Body, usage: Body, tag: str) -> BlendReport:
        missing = f"{self.connection.root} sent no report: start vLLM with kvrag's KV connector"
        content = (extras.get("kv_transfer_params") or {}).get("kvrag")
        if content is None and tag:  # vLLM sends it with complete answers only
            try:
                content = await self._ask({"mode": "report", "tag": tag})
            except KvragError as error:  # the answer is complete, and must not be lost
                missing = f"no report: {error}"
        return report_of(content, usage, missing)

    async def _room(self, body: Body) -> int:
        """Return the maximum length of the answer that fits: vLLM refuses prompts with longer ones."""
        max_tokens = int(body["max_tokens"])
        prompt = {name: body[name] for name in _PROMPT if name in body}
        # a token has at least one byte; a template adds text of its own
        if num_bytes(json.dumps(prompt, ensure_ascii=False)) + 1000 + max_tokens <= self.window:
            return max_tokens
        room = self.window - len(await self.tokenize(prompt))
        return min(max_tokens, room) if room > 0 else max_tokens  # vLLM describes the error

    async def _ask(self, params: Body, prompt: str | list[int] = " ") -> Body:
        """Send a request to the connector, on a prompt that reserves its pages; return the connector's response."""
        body: Body = {"model": self.name, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body["kv_transfer_params"] = {"kvrag": params}
        response = await self.connection.send("post", "/v1/completions", body=body)
        content = (response.get("kv_transfer_params") or {}).get("kvrag")
        if not isinstance(content, dict):
            raise ServerError(
                f"vLLM at {self.connection.root} has no KV connector of kvrag: start it with --kv-transfer-config"
            )
        if "error" in content:
            raise _ERRORS.get(str(content.get("type")), ServerError)(str(content["error"]))
        if (ignored := content.get("ignored")) and params["mode"] != "report":  # a report lists those of its answer
            raise SettingError("; ".join(map(str, ignored)))
        return content


Server = KvragServe | _Vllm


def _check_no_namespace(namespace: str) -> None:
    if namespace:
        raise SettingError(
            f"kvrag serve takes the namespace from the API key: leave out namespace={namespace!r}, and pass the key of "
            "that namespace as api_key="
        )


def whole_documents(texts: Sequence[NamedText], size: int) -> Iterator[Sequence[NamedText]]:
    """Yield parts of about this many bytes. No document and no source is divided, whatever its size."""
    last = {name: number for number, row in enumerate(texts) for name in (row.document, row.source) if name}
    start = filled = open_until = 0
    for number, row in enumerate(texts):
        if filled >= size and number > open_until:
            yield texts[start:number]
            start, filled = number, 0
        filled += num_bytes(row.text)
        open_until = max(open_until, last.get(row.document, 0), last.get(row.source, 0))
    if texts:
        yield texts[start:]


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


async def warm(
    server: Server,
    texts: Iterable[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    document: str | Sequence[str] = "",
    sources: str | Sequence[str] | None = None,
    namespace: str = "",
    skip_invalid: bool = False,
) -> WarmReport:
    """Encode texts; without any, forget the document."""
    named, reports, warnings, done = named_texts(texts, document, sources), list[Body](), list[str](), 0
    check_namespace(namespace)

    def numbered(message: str) -> str:  # among all texts
        return _CHUNK.sub(lambda found: f"{found[1]}{int(found[2]) + done}", message)

    if not named and document and isinstance(document, str):
        await server.command("forget", namespace, document=document)
    for part in whole_documents(named, server.part_bytes):
        columns = zip(("texts", "document", "sources"), map(list, zip(*part, strict=True)), strict=True)
        try:
            reports.append(await server.command("warm", namespace, **dict(columns), skip_invalid=skip_invalid))
        except PromptError as error:
            error.args = (numbered(str(error)),)
            error.chunk = int(found[2]) if (found := _CHUNK.match(str(error))) else None
            raise
        warnings += map(numbered, reports[-1].get("warnings") or ())
        done += len(part)
        if progress is not None:
            progress(done, len(named))
    names = [row.name for row in fields(WarmReport) if row.name != "warnings"]
    totals: dict[str, Any] = {name: sum(report[name] for report in reports) for name in names}
    return WarmReport(**totals, warnings=tuple(dict.fromkeys(warnings)))


async def find_server(connection: Connection, model: str | None) -> Server:
    """Detect the kind of a server, and its facts about a model; None = its first one."""
    root = connection.root
    entries = (await connection.send("get", "/v1/models")).get("data")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise connection.not_a_server()
    entry, probed = next((entry for entry in entries if model in (None, entry["id"])), None), Body()
    if entry is None:
        known = ", ".join(repr(entry["id"]) for entry in entries) or "none"
        raise ServerError(f"unknown model {model!r:.280}: {root} has {known}", 404)
    name = str(entry["id"])
    owner, has_chat_template = entry.get("owned_by"), bool(entry.get("has_chat_template", True))
    if owner != "kvrag":
        body = {"model": name, "messages": [{"role": "user", "content": "a"}]}
        try:
            probed = await connection.send("post", "/tokenize", body=body)
        except PromptError:
            has_chat_template = False
            probed = await connection.send("post", "/tokenize", body={"model": name, "prompt": "a"})
        except ServerError as error:
            if error.status != 404:  # a gateway may hide this endpoint
                raise
        if owner != "vllm" and "max_model_len" not in probed:  # behind a gateway, models may have another owner
            raise ServerError(
                f"{root} is neither kvrag serve nor vLLM (its models are owned by {owner!r}): use the class that your "
                "framework has for OpenAI's API"
            )
    window = entry.get("max_model_len") or probed.get("max_model_len")
    if not window:
        raise ServerError(f"{root} names no window of {name}: choose a model that answers, or update the server")
    return (KvragServe if owner == "kvrag" else _Vllm)(connection, name, int(window), has_chat_template)
