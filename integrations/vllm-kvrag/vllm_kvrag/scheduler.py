"""Scheduler side of the connector: selects the requests to blend, and creates the workers' tasks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrag import BlendConfig, BlendReport, KvragError, KVStore
from kvrag.config import DEFAULT_RATIO
from kvrag.index.catalog import Catalog, Match
from vllm_kvrag.fingerprint import tokenizer_of
from vllm_kvrag.params import ConnectorSettings, RequestParams, read_params
from vllm_kvrag.tasks import BlendTask, ForgetTask, Task, TaskOutcome, WarmTask

logger = logging.getLogger("vllm.kvrag")  # below vLLM's own logger, which has the handlers

_MAX_REPORTS = 1000  # kept for clients that stream
_MAX_VARIANTS = 200_000  # remembered
_UNDECIDED = "the workers' check at start-up is not done"
_LEAST_SHARE = 4  # blending gets at least 1/4 of a step's rows, so that prefill cannot starve it


@dataclass
class _Request:
    """A request that may be blended.

    Attributes:
        request: vLLM's request.
        matches: Runs of stored chunks after the first `kept` tokens.
        is_sent: The task was sent to the workers.
        cached: Number of leading tokens whose KV was in blended pages.
        report: Report of the workers.
    """

    params: RequestParams
    ids: list[int]
    request: Any
    matches: list[Match] = field(default_factory=list)
    kept: int = 0
    is_sent: bool = False
    is_done: bool = False
    cached: int = 0
    report: dict[str, Any] | None = None


class RequestTracker:
    """Tracks requests from arrival to report, on the scheduler side."""

    def __init__(self, store: KVStore | None, settings: ConnectorSettings, vllm_config: Any) -> None:
        """Track requests; blending is off until `decide` turns it on, which needs a store."""
        self._settings = settings
        if store is not None:
            self._store = store
            self._lookup = Catalog(store, alone_only=not settings.config.context_tokens)
        self._model_config = vllm_config.model_config
        scheduler = vllm_config.scheduler_config
        self._rows = settings.rows_per_step or scheduler.max_num_batched_tokens
        self._refusal = _UNDECIDED
        self._requests: dict[str, _Request] = {}
        self._tasks: dict[str, Task] = {}
        self._cancelled: list[str] = []
        self._tags: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._tokenizer: Any = None
        self._variants: dict[str, str] = {}  # chunk key by text key that prompts got last; "" = none
        self._changes = 0  # of variants

    def refuse(self, reason: str) -> None:
        """Turn blending off, and log why unless it is off for another reason."""
        if self._refusal in ("", _UNDECIDED):
            logger.warning("blending is off, vLLM serves as usual: %s", reason)
            self._refusal = reason

    def decide(self, refusal: str, untested: str) -> None:
        """Turn blending on or off after the workers' check.

        Args:
            refusal: Why one of them cannot blend; "" = all can.
            untested: Note on a version of vLLM that was not tested; "" = it was tested.
        """
        if refusal:
            self.refuse("; ".join(filter(None, [refusal, untested])))
        elif self._refusal == _UNDECIDED:
            self._refusal = ""
            if untested:
                logger.warning("%s; blending is on, because the check at start-up passed", untested)
            else:
                logger.info("blending is exact on this model and attention backend")
            ratio = self._settings.config.ratio
            logger.info(
                "the ratio of an answer is fixed, %s unless the request has one: vLLM draws the tokens, so no more is "
                "recomputed where the model is unsure",
                f"{DEFAULT_RATIO if ratio is None else ratio:g}",
            )

    def add(self, request: Any) -> None:
        """Register a new request, and match its prompt if it is to be blended."""
        if self._refusal == _UNDECIDED:
            self.refuse("this version of vLLM does not report the workers' check at start-up")
        params = read_params(request.kv_transfer_params, self._settings.config)
        entry = _Request(params, list(request.prompt_token_ids or ()), request)
        self._requests[request.request_id] = entry
        if self._refusal or not self._can_be_blended(request) or (params.ignored and params.mode in ("warm", "forget")):
            entry.is_done = True  # a default instead of an invalid parameter could delete or replace a document
            return
        if params.mode in ("warm", "forget"):
            self._salt(request, uuid.uuid4().hex)  # its pages are scratch space
        elif params.mode == "blend" and params.config.policy != "full" and (matches := self._match(entry, 0)):
            try:
                self._salt(request, self._recipe(params))
                entry.matches = matches
            except KvragError as error:
                logger.warning("the store cannot be read, a prompt is not blended: %s", error)

    def num_external(self, request: Any, num_computed: int) -> int:
        """Return the number of prompt tokens after the computed ones whose KV the workers provide."""
        entry = self._requests.get(request.request_id)
        if entry is None or self._refusal:
            return 0
        if entry.is_done and entry.report is not None and "error" in entry.report:
            return 0  # vLLM computes it
        if entry.params.mode in ("warm", "forget"):
            return 0 if entry.is_done else len(entry.ids) - num_computed
        if not entry.matches:
            return 0
        entry.cached = num_computed
        if num_computed != entry.kept or entry.is_sent:  # a prefix is cached, or the request was preempted
            matches = self._match(entry, num_computed)
            if not matches:
                return 0
            entry.matches, entry.kept = matches, num_computed
        return len(entry.ids) - num_computed

    def allocated(self, request: Any, blocks: list[int]) -> None:
        """Send a request to the workers."""
        entry = self._requests[request.request_id]
        params = entry.params
        task: Task
        if params.mode == "warm":
            texts = params.texts if params.texts is not None else [self._text(entry.ids)]
            task = WarmTask(texts, blocks, params)
        elif params.mode == "forget":
            task = ForgetTask(params.document if isinstance(params.document, str) else "", params.namespace)
        else:
            entry.matches = self._still_usable(entry)
            task = BlendTask(entry.ids, blocks, entry.kept, params.config, params.namespace, entry.matches)
        entry.is_sent, entry.is_done = True, False
        self._tasks[request.request_id] = task

    def take(self) -> tuple[dict[str, Task], list[str]]:
        """Return the new tasks and the cancelled requests for the next step."""
        tasks, cancelled = self._tasks, self._cancelled
        self._tasks, self._cancelled = {}, []
        return tasks, cancelled

    def rows_beside(self, num_scheduled: int) -> int:
        """Return the number of rows that blending may compute in a step with `num_scheduled` tokens."""
        return max(self._rows - num_scheduled, self._rows // _LEAST_SHARE)

    def take_outcomes(self, outcomes: Mapping[str, TaskOutcome]) -> None:
        """Record the outcomes of finished tasks.

        vLLM considers all external tokens computed. Those after the last that keeps its stored KV are not: they were
        counted as external to get pages for the query pass, and vLLM computes them in its next batch.
        """
        for name, outcome in outcomes.items():
            entry = self._requests.get(name)
            if entry is None:
                continue
            report = outcome.report
            entry.is_done, entry.report = True, report
            if outcome.complete is not None:
                entry.request.num_computed_tokens = min(entry.request.num_computed_tokens, outcome.complete)
            if entry.params.mode == "warm":
                with contextlib.suppress(KvragError):
                    self._lookup.refresh()  # so that the next prompt finds the new chunks
            if entry.params.tag:
                self._keep(entry.params.tag, report)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Remove a request; return the report for its response, None if it has none."""
        entry = self._requests.pop(request.request_id, None)
        if entry is None:
            return None
        if entry.is_sent and not entry.is_done:
            self._cancelled.append(request.request_id)
        report = self._report(entry)
        if report is not None and entry.params.ignored:
            report = {**report, "ignored": list(entry.params.ignored)}
        if report is not None and entry.params.tag and entry.params.mode == "blend":
            self._keep(entry.params.tag, report)
        return report

    def _report(self, entry: _Request) -> dict[str, Any] | None:
        params = entry.params
        if entry.report is not None:
            return entry.report
        if not params.has_params:
            return None
        if params.mode == "report":
            kept = self._tags.pop(params.tag, None)
            return kept if kept is not None else {"error": f"there is no report {params.tag!r}", "type": "PromptError"}
        if self._refusal and params.mode != "off":
            return {"error": f"blending is off: {self._refusal}", "type": "UnsupportedModelError"}
        if params.mode == "documents":
            try:
                return {"documents": list(self._store.documents(params.prefix, params.namespace))}
            except KvragError as error:
                return {"error": str(error), "type": type(error).__name__}
        if params.mode in ("warm", "forget"):
            return {"error": "the request was not carried out", "type": "PromptError"}
        return _nothing_blended(len(entry.ids), entry.cached, params.config)

    def _can_be_blended(self, request: Any) -> bool:
        """Return whether a request's KV depends only on its tokens, and may be provided by a connector."""
        return bool(
            request.prompt_token_ids
            and not getattr(request, "lora_request", None)
            and not getattr(request, "mm_features", None)
            and getattr(request, "prompt_embeds", None) is None
            and not request.skip_reading_prefix_cache  # logprobs of prompt tokens need all of them computed
            and getattr(request, "pooling_params", None) is None
        )

    def _match(self, entry: _Request, kept: int) -> list[Match]:
        withheld: set[str] = set()
        try:
            self._lookup.update()
            min_run = self._settings.config.min_run
            matches = self._lookup.find(entry.ids, min_run, entry.params.namespace, kept, withheld)
        except (KvragError, OSError) as error:
            logger.warning("the store cannot be read, a prompt is not blended: %s", error)
            return []
        self._record_variants(matches, withheld)
        return matches

    def _still_usable(self, entry: _Request) -> list[Match]:
        """Return the runs whose chunks are still usable: the request may have waited in the queue."""
        try:
            usable = self._lookup.usable(match.text_key for match in entry.matches)
        except (KvragError, OSError):
            return []
        return [match for match in entry.matches if usable.get(match.text_key) == match.run.key]

    def _record_variants(self, matches: list[Match], withheld: set[str]) -> None:
        if len(self._variants) > _MAX_VARIANTS:
            self._variants.clear()
            self._changes += 1  # changes of the cleared variants would go undetected
        current = {match.text_key: match.run.key for match in matches} | dict.fromkeys(withheld, "")
        for text_key, chunk_key in current.items():
            self._changes += self._variants.get(text_key, chunk_key) != chunk_key
            self._variants[text_key] = chunk_key

    def _recipe(self, params: RequestParams) -> str:
        """Return a hash of what blended pages depend on besides their tokens. Requests share pages only if it is equal.

        Includes the numbers of removals from the store and of changed variants, so that later requests do not reuse
        pages with KV of deleted documents, or with KV encoded with the preceding context of a source that is no longer
        the text's only one, or cannot be verified to be without the shared store.
        """
        recipe = [params.namespace, self._store.removals(), self._changes, asdict(params.config)]
        return hashlib.blake2b(json.dumps(recipe, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()

    def _salt(self, request: Any, salt: str) -> None:
        """Separate the pages of a request from other requests': rehash its blocks with a salt."""
        request.cache_salt = f"kvrag {salt} {request.cache_salt or ''}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _text(self, ids: list[int]) -> str:
        """Return the text of a prompt that consists of one chunk, without the preamble."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._model_config)
        preamble = list(self._tokenizer.preamble)
        return str(self._tokenizer.decode(ids[len(preamble) :] if ids[: len(preamble)] == preamble else ids))

    def _keep(self, tag: str, report: dict[str, Any]) -> None:
        self._tags[tag] = report
        while len(self._tags) > _MAX_REPORTS:
            self._tags.popitem(last=False)


def _nothing_blended(num_tokens: int, cached: int, config: BlendConfig) -> dict[str, Any]:
    """Return the report of a prompt that vLLM computed itself, except for `cached` leading tokens in blended pages."""
    ratio = DEFAULT_RATIO if config.ratio is None else config.ratio
    return BlendReport.unblended(
        num_tokens,
        cached,
        policy=str(config.policy) if cached else "full",
        ratio=ratio if cached else 1.0,
        exact=not cached or config.ratio == 1.0,
        conversation_tokens=cached,
    ).to_dict()
