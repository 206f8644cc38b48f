"""The settings of a server: its keys, its limits, and the defaults of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrag.config import check_namespace
from kvrag.errors import SettingError

TEMPLATE = "{context}\n\nQuestion: {question}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and the namespace that its requests belong to."""

    secret: str = field(repr=False)
    namespace: str = ""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not self.secret or not self.secret.isascii() or self.secret.split() != [self.secret]:
            raise SettingError("an API key must be ASCII without white space, and not empty")

    @classmethod
    def parse(cls, text: str, namespace: str = "") -> ApiKey:
        """Read `NAME:KEY`, a key of the namespace NAME, or `KEY`, a key of the namespace given."""
        name, colon, secret = text.partition(":")
        return cls(secret, name or namespace) if colon else cls(text, namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Sizes are in bytes, times in seconds.

    Attributes:
        name: Name of the model in requests; with a corpus, `name` + "-rag" is the model that retrieves by itself.
        api_keys: Every request must carry one of them; empty = no key is required. Requests see the documents,
            conversations, metrics and queue of their key's namespace, and of no other.
        namespace: Namespace of all requests where there are no keys.
        hosts: Host names that requests without a key may use, so that a page in a browser cannot reach the server
            under a name of its own; empty = any.
        origins: Web pages that may use the server from a browser, such as "http://localhost:3000"; "*" = all.
        template: What the last user message becomes, around `{context}`, the chunks joined by blank lines, and
            `{question}`.
        top_k, around: Retrieval, as in `ChunkIndex.search`.
        max_tokens: Longest answer where a request names no length ...
        token_limit: ... and the longest that a request may ask for.
        temperature: Default of requests; None = as the model's own generation config says.
        concurrency: Answers computed at a time. They alternate on the model, one forward pass each.
        queue: Requests of a namespace that wait for one of these places; more are rejected with 429.
        timeout: For a request's body to arrive, and for its answer, waiting included.
        max_body: Size of a request ...
        max_upload: ... and of an uploaded document.
        max_pending: Documents of a namespace that wait to be encoded.
    """

    name: str
    api_keys: tuple[ApiKey, ...] = ()
    namespace: str = ""
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    template: str = TEMPLATE
    top_k: int = 4
    around: int = 0
    max_tokens: int = 256
    token_limit: int = 4096
    temperature: float | None = None
    concurrency: int = 4
    queue: int = 32
    timeout: float = 600.0
    max_body: int = 8 << 20
    max_upload: int = 64 << 20
    max_pending: int = 256

    def __post_init__(self) -> None:
        least = {
            "top_k": 1,
            "max_tokens": 1,
            "token_limit": self.max_tokens,
            "concurrency": 1,
            "max_body": 1,
            "max_upload": 1,
            "max_pending": 1,
        }
        for name, bound in {**least, "around": 0, "queue": 0}.items():
            if getattr(self, name) < bound:
                raise SettingError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if not 0 < self.timeout < float("inf"):
            raise SettingError(f"timeout must be a positive number of seconds, got {self.timeout}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise SettingError(f"temperature must be in [0, 2], got {self.temperature}")
        if not self.name:
            raise SettingError("the model's name must not be empty")
        check_namespace(self.namespace)
        if len({key.secret for key in self.api_keys}) < len(self.api_keys):
            raise SettingError("two API keys are equal: give every key once")
        for part in ("{context}", "{question}"):
            if self.template.count(part) != 1:
                raise SettingError(f"the prompt template must have {part} exactly once")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that requests can have, each once."""
        return tuple(dict.fromkeys(key.namespace for key in self.api_keys)) or (self.namespace,)

    @property
    def rag_name(self) -> str:
        """Name of the model that retrieves by itself."""
        return f"{self.name}-rag"

    def prompt(self, context: list[str], question: str) -> str:
        """Return the template filled in."""
        before, _, after = self.template.partition("{question}")
        joined = "\n\n".join(context)  # a placeholder inside the question or the context is left alone
        return before.replace("{context}", joined) + question + after.replace("{context}", joined)
