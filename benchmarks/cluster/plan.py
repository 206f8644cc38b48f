"""Plan of a cluster: corpus, traffic, sizes, prices, and the speeds of one copy of the model."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.simulate import DEVICES, MODELS, Shape, speed_of
from kvrag.config import BlendConfig
from kvrag.errors import SettingError

SHAPES = MODELS | {"reader": Shape(4.1e6, 8, 256, 4, 4, 64)}
ROUTINGS = ("random", "rendezvous")

_PARALLEL = 0.8  # assumed share of the speed of several GPUs that tensor parallelism reaches


@dataclass(frozen=True)
class Profile:
    """Speeds of one replica, that is of one copy of the model.

    Attributes:
        prefill_tokens_per_s: Full prefill of a prompt of the plan's length.
        blend_share: Time of the model for a blended prompt, as a share of full prefill; without laying out the KV.
        overlap: Share of the time for blending during which KV can still be loaded.
        ram_bytes_per_s: From RAM to the model, layout and rotation included; the model waits.
        disk_bytes_per_s, store_bytes_per_s: From one machine's local disk, and over its network.
        store_total_bytes_per_s: From the shared store to all machines.
        store_latency_s: Until the first byte from the shared store.
        decode_step_s, decode_answer_s: A decoding step, and the additional time of each answer in it.
        measured: Names of the fields that were measured; all others are assumptions.
        source: Where the numbers are from.
    """

    prefill_tokens_per_s: float
    blend_share: float
    overlap: float
    ram_bytes_per_s: float
    disk_bytes_per_s: float
    store_bytes_per_s: float
    store_total_bytes_per_s: float
    store_latency_s: float
    decode_step_s: float
    decode_answer_s: float
    measured: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in SPEEDS:
            value = getattr(self, name)
            least = 0.0 if name in ("overlap", "store_latency_s", "decode_step_s", "decode_answer_s") else 1e-12
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise SettingError(f"{name} must be a positive number, got {value!r}")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file that `write` has written.

        Raises:
            SettingError: The file is not a profile.
        """
        try:
            content = json.loads(path.read_text("utf-8"))
            return cls(**content | {"measured": tuple(content.get("measured", ()))})
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(f"{path} is not a profile: {error}; write one with --calibrate {path}") from None

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


SPEEDS = tuple(name for name in Profile.__dataclass_fields__ if name not in ("measured", "source"))


@dataclass(frozen=True)
class Plan:
    """Corpus, traffic, sizes and prices.

    Attributes:
        chunks, chunk_tokens: The corpus.
        exponent: Of Zipf's law.
        chunks_per_prompt, system_tokens, question_tokens, answer_tokens: A request. The system prompt is the same for
            all requests, and in every cache.
        rate: Requests per second (Poisson).
        kv_bytes, stored_bytes: KV of a token in the model's memory, and as stored under the codec.
        device_gib, ram_gib, disk_gib: Room for chunks, per replica.
        stored: Share of the corpus that was warmed into the shared store, the most popular chunks.
        prefix_gib: Memory for the pages of prefix caching, per replica.
        controller: "auto": full prefill where the controller would choose it; "off": always blend.
        routing: "random", or "rendezvous": to the replica that is home to most of the prompt's chunks.
        gpus_per_replica: GPUs that hold one copy of the model.
        target_s: Time to first token that 95 % of the requests have to reach.
        gpu_hour, store_gb_month, reads_thousand: Prices: a GPU with its host per hour, 10^9 stored bytes per month, a
            thousand reads of 4 MiB.
        requests, seed: Size of the simulation.
    """

    chunks: int = 100_000_000
    chunk_tokens: int = 512
    exponent: float = 0.85
    chunks_per_prompt: int = 10
    system_tokens: int = 256
    question_tokens: int = 64
    answer_tokens: int = 128
    rate: float = 50.0
    kv_bytes: float = 131072.0
    stored_bytes: float = 131072.0
    device_gib: float = 0.0
    ram_gib: float = 256.0
    disk_gib: float = 4000.0
    stored: float = 0.01
    prefix_gib: float = 40.0
    controller: str = "auto"
    routing: str = "random"
    gpus_per_replica: int = 1
    target_s: float = 1.0
    gpu_hour: float = 3.0
    store_gb_month: float = 0.023
    reads_thousand: float = 0.0004
    requests: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 2 * self.chunks_per_prompt:
            raise SettingError(f"a corpus of {self.chunks} chunks is too small for {self.chunks_per_prompt} per prompt")
        if not 0 <= self.stored <= 1:
            raise SettingError(f"the stored share of the corpus must be from 0 to 1, got {self.stored:g}")

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt."""
        return self.system_tokens + self.chunks_per_prompt * self.chunk_tokens + self.question_tokens

    @property
    def chunk_bytes(self) -> float:
        """Stored bytes of a chunk."""
        return self.chunk_tokens * self.stored_bytes

    @property
    def stored_bytes_total(self) -> float:
        """Bytes in the shared store."""
        return self.stored * self.chunks * self.chunk_bytes


def profile_of(
    device: str, model: str, plan: Plan, ratio: float, policy: str, loads: dict[str, Any] | None = None
) -> Profile:
    """Derive a replica's speeds from the tables and the cost model of `python -m benchmarks simulate`.

    Args:
        loads: Fields of the profile that do not follow from the device: bandwidths and latency of disk and store.
    """
    from kvrag.control.cost import Workload, blend_seconds, full_seconds
    from kvrag.reuse.select import selecting

    shape, spec = SHAPES[model], DEVICES[device]
    scale = 1.0 if plan.gpus_per_replica == 1 else _PARALLEL * plan.gpus_per_replica
    replica = replace(spec, flops=spec.flops * scale, memory=spec.memory * scale, into=spec.into * scale)
    if 2 * shape.params > spec.room * plan.gpus_per_replica:
        raise SettingError(
            f"{model} does not fit into {plan.gpus_per_replica} x {device} in bf16: use more --gpus-per-replica"
        )
    speed = replace(speed_of(replica, shape, 1.0), stitch_s=0.0)  # the layout is counted by ram_bytes_per_s
    selects = selecting(BlendConfig(policy=policy), shape.layers)
    reused = plan.chunks_per_prompt * plan.chunk_tokens
    request = Workload(plan.prompt_tokens, reused, reused, 0.0, selects, kept=plan.system_tokens)
    full_s, blend_s = full_seconds(speed, plan.prompt_tokens), blend_seconds(speed, request, ratio)
    # during a long load, this much of the time for blending is still to come
    waiting = blend_seconds(speed, replace(request, bytes=1e6), ratio) - 1e6
    return Profile(
        prefill_tokens_per_s=plan.prompt_tokens / full_s,
        blend_share=blend_s / full_s,
        overlap=1 - waiting / blend_s,
        ram_bytes_per_s=replica.into,
        decode_step_s=speed.pass_s,
        decode_answer_s=plan.prompt_tokens * plan.kv_bytes / replica.memory,
        **LOAD_SPEEDS | (loads or {}),
        source=f"{model} on {plan.gpus_per_replica} x {device}; {spec.source}",
    )


LOAD_SPEEDS: dict[str, Any] = {
    "disk_bytes_per_s": 6e9,
    "store_bytes_per_s": 2.5e9,
    "store_total_bytes_per_s": 100e9,
    "store_latency_s": 0.03,
}
"""Assumed: NVMe; 80 % of 25 Gbit/s; a bucket for many readers; the middle of 10 to 50 ms."""

LOAD_UNITS = dict(zip(LOAD_SPEEDS, (1e9, 1e9, 1e9, 1e-3), strict=True))
"""Units of their options: GB/s, and ms."""
