"""Life of a request: from prompt ids to a cache that is ready to decode.

`Pipeline.prefill` follows CacheBlend (arXiv:2405.16444): look up the prompt's chunks, plan how much to recompute (the
paper's section 5, "loading controller"), load their KV, stitch it in prompt order, select the tokens to recompute
(section 4.3), blend (section 4.2), and observe the durations for the next plan.

Loading and stitching are lazy: `select` and `blend` ask for one layer at a time, and the next layers are read meanwhile
(section 5). A request is a `Prompt` until its KV is stitched, then a `Stitched`; `prefill` returns it as a `Prefilled`,
which is a `Stitched` with the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.control.tuning import Plan, Tuning
from kvrag.index.lookup import Lookup, Match
from kvrag.memory.tier import MemoryTier
from kvrag.reuse.blend import blend, blended_rows
from kvrag.reuse.deepen import Deepening, Prefilled
from kvrag.reuse.load import LayerLoader
from kvrag.reuse.prompt import Prompt
from kvrag.reuse.recovery import Recovery
from kvrag.reuse.select import select
from kvrag.reuse.stitch import Stitched, stitch
from kvrag.reuse.trace import Trace
from kvrag.store import KVStore
from kvrag.tracing import record_steps
from kvrag.types import BlendReport

_ROOM = 256  # spare positions for the answer in a new cache; it grows when they are used up


@dataclass(frozen=True)
class Pipeline:
    """The components that all requests share. Each is thread-safe, so this class is too."""

    backend: Backend
    store: KVStore
    memory: MemoryTier  # chunks of the store that are in memory
    lookup: Lookup  # finds the runs of stored chunks in a prompt
    tuning: Tuning  # chooses policy and ratio
    codec: str  # of the stored chunks

    def prefill(self, prompt: Prompt, matches: Sequence[Match] | None = None) -> Prefilled:
        """Prefill a prompt from stored chunks: `matches`, or those that are looked up.

        Chunks that cannot be read are computed like fresh text.
        """
        recovery = Recovery(self.backend, self.store, self.memory)
        return recovery.run(lambda: self._prefill(prompt, matches, recovery))

    def _prefill(self, prompt: Prompt, matches: Sequence[Match] | None, recovery: Recovery) -> Prefilled:
        trace = Trace(self.backend)
        with trace.step("match", synchronise=False):
            if matches is None:
                matches = self.lookup.find(prompt.ids, prompt.config.min_run, prompt.namespace, prompt.kept)
            if prompt.is_full:
                prompt = replace(prompt, matches=matches)
            else:
                prompt = recovery.open(prompt, matches).with_history(self.backend)
        with closing(prompt):
            plan = recovery.agree(lambda: self.tuning.plan(prompt.config, prompt))  # the same on all ranks
            chunks = prompt.chunks  # also of a full plan: deleting a chunk deletes the conversations that contain it
            if plan.is_full:
                prompt = replace(prompt, matches=(), readers={})
            capacity = min(len(prompt.ids) + _ROOM, self.backend.context_window)
            with closing(LayerLoader(self.backend, prompt, self.codec, trace, capacity)) as layers:
                recovery.agree(layers.wait)
                with trace.step("stitch", synchronise=False):
                    stitched = stitch(self.backend, prompt, layers)
                with trace.step("select"):
                    selection = select(self.backend, stitched, plan.config, wants_logits=plan.margin > 0)
                    selected = selection.selected
                with trace.step("blend"):
                    logits = blend(self.backend, stitched, selected)
            self.tuning.observe(prompt, stitched, len(blended_rows(self.backend, stitched, selected)), trace)
            report = _report(prompt, plan, stitched, selected, trace, recovery.notes)
        record_steps(trace.times)
        self.store.touch([run.key for run in prompt.stored])
        deepening = Deepening(self.backend, stitched, selection, plan.margin) if plan.margin else None
        return Prefilled(
            **vars(stitched),
            selected=selected,
            logits=logits,
            config=plan.config,
            report=report,
            with_context=prompt.with_context,
            chunks=chunks,
            deepening=deepening,
        )


def _report(
    prompt: Prompt, plan: Plan, stitched: Stitched, selected: Tensor, trace: Trace, notes: Sequence[str]
) -> BlendReport:
    num_tokens, reused = len(prompt.ids), int(stitched.reused.sum())
    times: dict[str, Any] = {f"{step}_s": seconds for step, seconds in trace.seconds.items()}
    return BlendReport(
        prompt_tokens=num_tokens,
        reused_tokens=reused,
        recomputed_tokens=len(selected),
        fresh_tokens=num_tokens - reused,
        runs=tuple(prompt.stored),
        policy=plan.config.policy,
        ratio=plan.ratio,
        **times,
        ttft_s=0.0,  # set by the caller
        bytes_loaded=prompt.bytes_read,
        tier=prompt.tier,
        exact=stitched.num_exact(selected) == num_tokens,
        notes=(*prompt.notes, *plan.notes, *notes),
        decision=plan.reason,
        conversation_tokens=stitched.kept,
        moved_tokens=sum(map(len, prompt.runs)) - sum(map(len, prompt.stored)),
    )
