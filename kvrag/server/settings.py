"""Server settings: API keys, limits, and request defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrag.config import check_fields, check_namespace, check_number, number
from kvrag.errors import SettingError

TEMPLATE = "{context}\n\nQuestion: {question}"


def fill(template: str, context: list[str], question: str) -> str:
    """Return a prompt template filled in; the texts of the context are joined by blank lines."""
    before, _, after = template.partition("{question}")
    joined = "\n\n".join(context)  # placeholders inside the question or the context are not replaced
    return before.replace("{context}", joined) + question + after.replace("{context}", joined)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key and the namespace of its requests."""

    secret: str = field(repr=False)
    namespace: str = ""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not self.secret or not self.secret.isascii() or self.secret.split() != [self.secret]:
            raise SettingError("an API key must be non-empty ASCII without white space")

    @classmethod
    def parse(cls, text: str, namespace: str = "") -> ApiKey:
        """Parse `NAME:KEY`, a key of the namespace NAME, or `KEY`, a key of the given namespace."""
        name, colon, secret = text.partition(":")
        return cls(secret, name or namespace) if colon else cls(text, namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Sizes are in bytes, times in seconds."""

    name: str  # of the model in requests; with a corpus, `name` + "-rag" is the model with retrieval
    api_keys: tuple[ApiKey, ...] = ()  # empty = no key is required. Requests see only their key's namespace
    namespace: str = ""  # of all requests without keys
    hosts: tuple[str, ...] = ()  # host names in requests without keys, against DNS rebinding; empty = any
    origins: tuple[str, ...] = ()  # web origins, such as "http://localhost:3000", of browser clients; "*" = all
    page: Path | None = None  # folder of the page at `/`; None = there is none
    template: str = TEMPLATE  # of the last user message; `{context}` becomes the chunks, joined by blank lines
    top_k: int = number(4, least=1, whole=True)  # as in `ChunkIndex.search`, like `around`
    around: int = number(0, whole=True)
    max_tokens: int = number(256, least=1, whole=True)  # default of requests without a limit ...
    token_limit: int = number(4096, least=1, whole=True)  # ... and maximum, to which requests are cut
    temperature: float | None = number(None, most=2)  # default of requests; None = the model's own generation config
    concurrency: int = number(16, least=1, whole=True)  # requests whose answers are decoded together
    queue: int = number(32, whole=True)  # waiting requests per namespace; more are rejected with 429
    timeout: float = 600.0  # of a request's body, and of its answer, waiting included
    max_body: int = number(8 << 20, least=1, whole=True)  # of a request ...
    max_upload: int = number(64 << 20, least=1, whole=True)  # ... and of an uploaded document

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("token_limit", self.token_limit, self.max_tokens)
        if not 0 < self.timeout < float("inf"):
            raise SettingError(f"timeout must be a positive number of seconds, got {self.timeout}")
        if not self.name:
            raise SettingError("the model name must not be empty")
        check_namespace(self.namespace)
        if len({key.secret for key in self.api_keys}) < len(self.api_keys):
            raise SettingError("two API keys are equal: pass each key once")
        if self.page is not None and not (self.page / "index.html").is_file():
            raise SettingError(f"{self.page} has no index.html: pass the folder of a page, such as examples/chat")
        for part in ("{context}", "{question}"):
            if self.template.count(part) != 1:
                raise SettingError(f"the prompt template must contain {part} exactly once")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of requests, without duplicates."""
        return tuple(dict.fromkeys(key.namespace for key in self.api_keys)) or (self.namespace,)

    @property
    def rag_name(self) -> str:
        """Name of the model with retrieval."""
        return f"{self.name}-rag"
