"""Life of a request: from prompt ids to a cache that is ready to decode.

`Pipeline.prefill` follows CacheBlend (arXiv:2405.16444): look up the prompt's chunks, plan how much to recompute (the
paper's section 5, "loading controller"), load their KV, stitch it in prompt order, select the tokens to recompute
(section 4.3), blend (section 4.2), and observe the durations for the next plan.

Loading and stitching are lazy: `select` and `blend` ask for one layer at a time, and the next layers are read meanwhile
(section 5). Each step fills in its part of the `RequestState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kvrag.backend.protocol import Backend
from kvrag.control.plan import Plan, Planner
from kvrag.index.catalog import Catalog, Match
from kvrag.memory.tier import MemoryTier
from kvrag.reuse.blend import LateRecompute, blend, blended_rows, select, stitch
from kvrag.reuse.load import LayerLoader, Recovery, Trace
from kvrag.reuse.request_state import RequestState
from kvrag.store import KVStore
from kvrag.types import BlendReport

_ROOM = 256  # spare positions for the answer in a new cache; the cache grows when they are used up


@dataclass(frozen=True)
class Pipeline:
    """The components that all requests share. Each is thread-safe, so this class is too."""

    backend: Backend
    store: KVStore
    memory: MemoryTier  # chunks of the store that are in memory
    lookup: Catalog  # finds the runs of stored chunks in a prompt
    planner: Planner  # chooses policy, ratio and margin
    codec: str  # of the stored chunks

    def prefill(self, request: RequestState, plan: Plan, matches: Sequence[Match] | None = None) -> None:
        """Prefill a request from stored chunks. Chunks that cannot be read are computed like fresh text.

        Args:
            plan: From `Planner.plan`, before the chunks are known: it decides which kept prefix can be used. Another
                one, with the chunks, sets the final policy and ratio.
            matches: Chunks to use; None = look them up.
        """
        recovery = Recovery(self.backend, self.store, self.memory)
        recovery.run(lambda: self._prefill(request, plan, matches, recovery))
        self.store.touch([run.key for run in request.report.runs])

    def _prefill(self, request: RequestState, plan: Plan, matches: Sequence[Match] | None, recovery: Recovery) -> None:
        backend, trace = self.backend, Trace(self.backend)
        with closing(request):
            with trace.step("match", synchronise=False):
                if matches is None:
                    matches = self.lookup.find(
                        request.token_ids, request.config.min_run, request.namespace, request.kept
                    )
                recovery.open(request, matches)
                request.add_history(backend)
            request.planned = plan.config
            # in all processes of tensor parallelism alike
            if request.runs and not plan.is_full:
                plan = recovery.agree(lambda: self.planner.plan(request.config, request.namespace, request))
            if plan.is_full:
                request.reuse_nothing()
            capacity = min(len(request.ids) + _ROOM, backend.context_window)
            with closing(LayerLoader(backend, request, self.codec, trace, capacity)) as layers:
                recovery.agree(layers.wait)
                with trace.step("stitch", synchronise=False):
                    stitch(backend, request, layers)
                with trace.step("select"):
                    request.selected, request.deeper = select(backend, request, plan.config)
                with trace.step("blend"):
                    request.logits = blend(backend, request)
            self.planner.observe(request, len(blended_rows(backend, request)), trace)
            request.recomputed = request.selected  # grows if it is completed
            request.report = _report(request, plan, trace, recovery.notes)
        is_open = (plan.margin or plan.is_observed) and not request.report.exact
        request.late = LateRecompute(backend, request, plan.margin, plan.start) if is_open else None


def _report(request: RequestState, plan: Plan, trace: Trace, notes: Sequence[str]) -> BlendReport:
    num_tokens = len(request.ids)
    times: dict[str, Any] = {f"{step}_s": seconds for step, seconds in trace.seconds.items()}
    return BlendReport(
        prompt_tokens=num_tokens,
        **request.counts(),
        runs=tuple(request.stored),
        policy=str(plan.config.policy),  # a plain text, for serialisers
        ratio=plan.ratio,
        **times,
        ttft_s=0.0,  # set by `RequestState.note_first_token`
        bytes_loaded=request.bytes_read,
        tier=request.tier,
        exact=request.num_exact(request.selected) == num_tokens,
        notes=(*request.notes, *notes),
        decision=plan.reason,
        conversation_tokens=request.kept,
        moved_tokens=sum(map(len, request.runs)) - sum(map(len, request.stored)),
    )
