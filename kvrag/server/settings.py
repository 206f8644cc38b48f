"""What a server allows and what it answers with where a request does not say."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.errors import SettingError

TEMPLATE = "{context}\n\nQuestion: {question}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Sizes are in bytes, times in seconds.

    Attributes:
        name: What the model is called in requests; with a corpus, `name` + "-rag" is the one that retrieves by itself.
        api_keys: One of them must be given with every request; empty = none is asked for.
        hosts: Names by which the server may be called while there is no key, so that a page in somebody's browser
            cannot reach it under a name of its own; empty = any.
        origins: Web pages that may use it from a browser, such as "http://localhost:3000"; "*" = all.
        template: What the last user message becomes around `{context}`, chunks joined by blank lines, and `{question}`.
        top_k, around: Retrieval, as in `ChunkIndex.search`.
        max_tokens: Longest answer where a request does not say ...
        token_limit: ... and the longest that it may ask for.
        temperature: Where a request does not say; None = as the model's own generation config says.
        concurrency: Answers under way at a time. They take turns with the model, a forward pass each.
        queue: Requests that wait for one of these places; more are turned away.
        timeout: For a request's body to come, and for its answer, waiting included.
        max_body: Of a request ...
        max_upload: ... and of a document that is uploaded.
        max_pending: Documents that wait to be encoded.
    """

    name: str
    api_keys: tuple[str, ...] = ()
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
        if any(not key or not key.isascii() or key.split() != [key] for key in self.api_keys):
            raise SettingError("an API key must be ASCII without white space, and not empty")
        for part in ("{context}", "{question}"):
            if self.template.count(part) != 1:
                raise SettingError(f"the prompt template must have {part} exactly once")

    @property
    def rag_name(self) -> str:
        """Name of the model that retrieves by itself."""
        return f"{self.name}-rag"

    def prompt(self, context: list[str], question: str) -> str:
        """The template filled in."""
        before, _, after = self.template.partition("{question}")
        joined = "\n\n".join(context)  # neither text is searched for the other's place
        return before.replace("{context}", joined) + question + after.replace("{context}", joined)
