"""The fields that both LangChain classes have, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, Self
from urllib.parse import quote

from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from kvrag import BlendEngine, Explanation, LazyEngine, LLMSettings, SettingError, WarmReport

_VERSION = version("langchain-kvrag")
_Plain = Annotated[str, BeforeValidator(LLMSettings.plain)]


def source_name(document: Document | str, namespace: str = "default") -> str:
    """What a document is a piece of, as LangChain's loaders say in its metadata; "" = not known."""
    source = document.metadata.get("source") if isinstance(document, Document) else None
    return "" if source is None else f"langchain/{quote(namespace, safe='')}/{source}"


def plain_texts(given: Any) -> Any:
    """What a prompt will have of a list of documents or texts; anything else is left to who reads it."""
    if not isinstance(given, (list, tuple)):
        return given
    return [one.page_content if isinstance(one, Document) else one for one in given]


class BlendSettings(BaseLanguageModel[Any]):
    """An engine, or the model and the store of one, and the settings of its answers.

    Making an object is cheap: the model is loaded when it answers for the first time, and shared with all objects that
    have equal settings.

    Attributes:
        model: A hub name, a folder, or "reader" for the small model that comes with kvrag.
        store: Folder of the pre-encoded chunks; None = one of this model's under `~/.cache/kvrag`.
        codec: How chunks are stored there: "native", "int8" or "int4"; see `BlendEngine`.
        engine: One already built, instead of all that is said about the model.
        temperature: 0 = greedy. It and the other sampling settings: None = as the model's generation config says.
        stop: The answer ends before the first of these strings. Those given per call are added.
        ratio: Share of the reused tokens to recompute; 0 = plain reuse, 1 = full prefill's answer. None = what
            `kvrag calibrate` found, else 0.15.
        policy: Which ones; see `kvrag.POLICIES`.
        controller: "off" = never full prefill, nor a higher ratio, where neither ratio nor policy was given; see
            `kvrag.BlendConfig`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: _Plain | None = None
    store: _Plain | None = None
    codec: str = "native"
    engine: BlendEngine | None = Field(default=None, exclude=True, repr=False)
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    ratio: float | None = None
    policy: str | None = None
    controller: str | None = None
    dtype: _Plain = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    _lazy: LazyEngine = PrivateAttr(default_factory=LazyEngine)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        LLMSettings.of(self)
        return self

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        self._add_version("langchain-kvrag", _VERSION)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Settings can be written and read, as long as they do not hold an engine; what they open is never written."""
        return True

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """For LangChain's `dumps` and for traces."""
        return super().to_json() if self.engine is None else self.to_json_not_implemented()

    def _open(self) -> BlendEngine:
        return self._lazy.open(LLMSettings.of(self))

    def _asked(self, stop: list[str] | None, call: dict[str, Any]) -> tuple[LLMSettings, dict[str, Any]]:
        """Settings of the engine that a call wants, and what it wants from that."""
        settings, asked = LLMSettings.of(self), dict(call)
        asked.pop("stream", None)  # LangChain has acted upon it
        asked["documents"] = plain_texts(asked.get("documents"))
        model = LLMSettings.plain(asked.pop("model", None))
        if model is not None and model != settings.model_name:
            settings = replace(settings, model=model, engine=None)
        return settings, settings.request(stop=stop, **asked)

    def warm(
        self,
        texts: Iterable[str | Document],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
    ) -> WarmReport:
        """Encode every chunk that the store lacks; see `BlendEngine.warm`.

        Args:
            texts: Documents in reading order, or their `page_content`.
            document: What holds them.
            sources: What they are pieces of; None = what documents have as `source` in their metadata.
        """
        if isinstance(texts, str):
            raise SettingError("texts must be a list of chunks, not one string")
        given = list(texts)
        if sources is None and any(source_name(one) for one in given):
            sources = [source_name(one) for one in given]
        return self._open().warm(plain_texts(given), document=document, sources=sources)

    def explain(
        self,
        prompt: str | list[dict[str, Any]] | dict[str, Any] | None = None,
        *,
        retrieved: Sequence[str | Document] | None = None,
    ) -> Explanation:
        """Say what was reused of the prompt that was answered last, and why not more; see `BlendEngine.explain`.

        Args:
            prompt: Another one instead: a text, messages as dicts with `role` and `content`, or that of an earlier
                answer, told by its `response_metadata["kvrag"]`: a shared engine's last answer may be somebody else's.
            retrieved: What the retriever returned for it: documents, or their `page_content`.
        """
        engine = self._open()
        if isinstance(prompt, str):
            prompt = engine.model.tokenizer.as_prompt(prompt)
        texts = plain_texts(retrieved)
        return engine.explain(prompt, retrieved=texts, ratio=self.ratio, policy=self.policy, controller=self.controller)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids as the model's own tokenizer has them."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._open().model.tokenizer.encode(text)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        identity = LLMSettings.of(self).identity()
        # under its own name, LangChain would overwrite it with the stop strings of the call in the key of its cache
        return identity | {"stop_sequences": identity.pop("stop")}
