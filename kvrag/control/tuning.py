"""What the engine knows of its model and machine beyond the settings, and what follows from it for a request.

That is a calibration, and how fast things are here. Both are kept beside the chunks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import DEFAULT_POLICY, DEFAULT_RATIO, BlendConfig
from kvrag.control import calibrate
from kvrag.control import cost as speed
from kvrag.control.calibrate import Calibration
from kvrag.control.controller import Decision, Request, decide, selecting
from kvrag.control.cost import Busy, Speedometer
from kvrag.errors import StoreError
from kvrag.reuse.blend import SLAB
from kvrag.reuse.stitch import Stitched
from kvrag.store import ChunkReader, KeepsTexts, KVStore, Texts
from kvrag.store.codec import tokens_of
from kvrag.types import Run

logger = logging.getLogger("kvrag")

_KEEP_S = 60.0  # between writings of what was measured, and between looks at a disk that was too slow
_PROBE_BYTES = 1 << 20


class Tuning:
    """A calibration and running measurements of one engine. Thread-safe."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self._model = model
        self._path = store.stats().path
        self._texts: KeepsTexts = store if isinstance(store, KeepsTexts) else Texts()
        self._calibration: tuple[Calibration | None, str] | None = None
        self._machine = f"{model.fingerprint.digest} {_device_name(model)} {torch.get_num_threads()} threads"
        self._speedometer = Speedometer(model.config.hidden_size)
        self._speed_kept = time.monotonic()
        self._recall_speed()

    def settle(self, config: BlendConfig, notes: list[str]) -> BlendConfig:
        """Fill in the ratio; what the result says of the controller is whether there is anything for it to decide."""
        if config.policy in ("none", "full"):
            effective = 1.0 if config.policy == "full" else 0.0
            return replace(config, ratio=effective if config.ratio is None else config.ratio, controller="off")
        if config.ratio is not None:
            return replace(config, controller="off")
        calibration, note = self._calibrated(config)
        if note:
            notes.append(note)
        if calibration is not None and calibration.ratio is None:
            nothing_holds = f"calibration: no ratio up to {calibration.curve[-1].ratio:g} holds the target"
            if config.controller == "auto":
                notes.append(f"{nothing_holds}, hence full prefill")
                return replace(config, policy="full", ratio=1.0)
            notes.append(f"{nothing_holds}; {DEFAULT_RATIO:g} all the same, as the policy was given")
        ratio = calibration.ratio if calibration is not None else None
        decides = config.controller == "auto" and config.policy == DEFAULT_POLICY
        return replace(config, ratio=DEFAULT_RATIO if ratio is None else ratio, controller="auto" if decides else "off")

    def _calibrated(self, config: BlendConfig) -> tuple[Calibration | None, str]:
        """The calibration that holds for these settings, if any, and what is to be said about one that does not."""
        if self._calibration is None:
            try:
                text = self._texts.read_text(calibrate.FILE)
                self._calibration = (Calibration.from_json(text) if text else None), ""
            except (StoreError, ValueError) as error:
                again = f"ignored; `kvrag calibrate` writes it anew ({error})"
                self._calibration = None, f"{self._path}/{calibrate.FILE} is damaged: {again}"
        calibration, note = self._calibration
        if calibration is not None and (why := calibration.mismatch(self._model.fingerprint.digest, config)):
            return None, f"the store's calibration is ignored: it was made for {why}"
        return calibration, note

    def decide(
        self, config: BlendConfig, num_tokens: int, runs: Sequence[Run], readers: Mapping[str, ChunkReader], kept: int
    ) -> Decision:
        """Ask the controller, after a look at the disk where it knows all but that.

        Args:
            kept: How many of the prompt's tokens are the conversation's.
        """
        meter, below = self._speedometer, [reader for reader in readers.values() if reader.tier != "ram"]
        if below and meter.knows_passes() and meter.speed() is None:
            self._probe(below[0])
        decision = self._ask(config, num_tokens, runs, readers, kept)
        if decision.full and below and meter.load_age > _KEEP_S:  # full prefill would never find out by itself
            self._probe(below[0])
            decision = self._ask(config, num_tokens, runs, readers, kept)
        return decision

    def _ask(
        self, config: BlendConfig, num_tokens: int, runs: Sequence[Run], readers: Mapping[str, ChunkReader], kept: int
    ) -> Decision:
        to_load = sum(len(run) for run in runs if readers[run.key].tier != "ram")
        behind_preamble = runs[0].offset == 0 and runs[0].start == len(self._model.tokenizer.preamble)
        reused = sum(map(len, runs))
        listens, detects, sifts = selecting(config, self._model.num_layers)
        request = Request(
            prompt=num_tokens,
            reused=reused,
            inexact=reused - (len(runs[0]) if behind_preamble else 0),
            bytes=to_load * self._speedometer.bytes_per_token(self._model.bytes_per_token),
            listens=listens,
            detects=detects,
            sifts=sifts,
            kept=kept,
        )
        assert config.ratio is not None  # settled
        return decide(self._speedometer.speed(), request, config.ratio)

    def _probe(self, reader: ChunkReader) -> None:
        """Read a little of a chunk; keeps no more of a slow disk busy than its first layers."""
        started, before = time.perf_counter(), reader.bytes_read
        for number in range(reader.num_layers):
            keys, _ = reader.layer(number)
            if reader.bytes_read - before >= _PROBE_BYTES:
                break
        share = tokens_of(keys) * (number + 1) / reader.num_layers
        self._speedometer.saw_load(reader.bytes_read - before, share, time.perf_counter() - started)

    def saw_encoding(self, lengths: Sequence[int], passes: int, seconds: float) -> None:
        """Chunks of these many tokens were encoded in so many forward passes."""
        pairs = sum(length * length for length in lengths) / 2
        self._speedometer.saw_pass("encode", sum(lengths), pairs, seconds, passes)

    def saw_full(self, num_tokens: int, seconds: float) -> None:
        """A prompt of that many tokens was prefilled in full."""
        self._speedometer.saw_pass("full", num_tokens, num_tokens**2 / 2, seconds)

    def saw_blend(
        self,
        stitched: Stitched,
        rows: int,
        runs: Sequence[Run],
        readers: Mapping[str, ChunkReader],
        busy_s: float,
        blend_s: float,
    ) -> None:
        """A prompt was blended.

        Args:
            rows: How many positions were computed.
            busy_s: While something was being read.
            blend_s: The pass itself, without waiting for the store and laying out.
        """
        passes = 1 if self._model.rope_follows_length else math.ceil(rows / SLAB)
        self._speedometer.saw_pass("blend", rows, rows * len(stitched.ids), blend_s, passes)
        to_load = sum(len(run) for run in runs if readers[run.key].tier != "ram")
        self._speedometer.saw_load(sum(reader.bytes_read for reader in readers.values()), to_load, busy_s)
        if not stitched.kept:  # copying is no rotating
            self._speedometer.saw_stitch(int(stitched.reused.sum()), stitched.stitch_s)
        if time.monotonic() - self._speed_kept > _KEEP_S:
            self.keep_speed()

    def keep_calibration(self, found: Calibration) -> Calibration:
        """Use it from now on, and store it; returns it with a note if that failed: minutes of work are not lost."""
        try:
            self._texts.write_text(calibrate.FILE, found.to_json())
        except StoreError as error:
            found = replace(found, notes=(*found.notes, f"kept for this process only: {error}"))
        self._calibration = found, ""
        return found

    def _recall_speed(self) -> None:
        try:
            kept = speed.read(self._speed_text(), self._machine)
            if kept is not None:
                self._speedometer.take(kept)
        except ValueError as error:
            logger.warning("%s/%s is damaged and is measured anew: %s", self._path, speed.FILE, error)

    def _speed_text(self) -> str | None:
        try:
            return self._texts.read_text(speed.FILE)
        except StoreError as error:
            logger.warning("measured speeds are ignored: %s", error)
            return None

    def keep_speed(self) -> None:
        """Store what was measured, if anything was."""
        self._speed_kept = time.monotonic()
        if self._speedometer.changed:
            text = speed.write(self._speed_text(), self._machine, self._speedometer.to_dict())
            with contextlib.suppress(StoreError):  # no answer and no ingestion depends on it
                self._texts.write_text(speed.FILE, text)


class TimedReader:
    """A reader that tells how long reading takes, several threads at once counted once."""

    def __init__(self, reader: ChunkReader, busy: Busy) -> None:
        self._reader, self._busy = reader, busy
        self.tier, self.num_layers = reader.tier, reader.num_layers
        self.context, self.source = reader.context, reader.source

    @property
    def bytes_read(self) -> int:
        """See ChunkReader.bytes_read."""
        return self._reader.bytes_read

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """See ChunkReader.layer."""
        with self._busy:
            return self._reader.layer(number)

    def close(self) -> None:
        """See ChunkReader.close."""
        self._reader.close()


def _device_name(model: Model) -> str:
    """The machine as well: two of them that share a store read it at different speeds."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return f"{platform.node()} {device}"
