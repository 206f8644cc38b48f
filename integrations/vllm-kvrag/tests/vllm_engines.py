"""Engines for the tests: a tiny random model of a family in vLLM, and kvrag's own engine on the same checkpoint."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch
from families import build
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_kvrag import worker

from kvrag import BlendEngine, Model
from kvrag.backend.transformers.loading import reader_path
from kvrag.request import Request
from kvrag.store import KVStore

_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}

_GEMMA4: dict[str, Any] = {
    "global_head_dim": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4-shared": ("gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 2}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mistral-window": ("mistral", {"sliding_window": 256}),
    "qwen3_5": ("qwen3_5_text", _HYBRID),
    "qwen3_next": (
        "qwen3_next",
        _HYBRID
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}

_WORDS = ("Mira", "Brel", "lives", "plays", "harp", "company", "sells", "chairs", "goat", "studied", "banjo", "river")


def text_of(number: int, sentences: int = 4) -> str:
    """A chunk of about 20 tokens per sentence, different for each number: no two have a run in common."""
    choice = random.Random(number)
    made = [" ".join([*choice.choices(_WORDS, k=6), str(choice.randrange(1000))]) for _ in range(sentences)]
    return f"{number}: {'. '.join(made)}."


CHUNKS = [text_of(number) for number in range(8)]
QUESTION = "Question: who plays the harp?\nAnswer:"


def prompt_of(*chunks: str, question: str = QUESTION) -> str:
    """A prompt of these chunks and a question."""
    return "\n\n".join([*chunks, question])


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A random model of the family with the reader's tokenizer; created once."""
    path = folder / "-".join([family, *map(str, changes.values())])
    if path.exists():
        return path
    tokenizer = AutoTokenizer.from_pretrained(reader_path())
    name, more = MODELS[family]
    sizes = {
        "vocab_size": len(tokenizer) + (-len(tokenizer)) % 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = build(name, **(sizes | more | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def quantised(model: Path, folder: Path, kind: str) -> Path:
    """A copy of a checkpoint whose linear layers are quantised: "int8" or "fp8" with their inputs, "gptq" without."""
    path = folder / f"{model.name}-{kind}"
    shutil.copytree(model, path, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer, _, _ = name.rpartition(".")
        if not layer.endswith("_proj"):
            tensors[name] = weight.bfloat16()
        elif kind == "gptq":
            groups = weight.T.reshape(-1, 32, len(weight))  # (K / 32, 32, N)
            scales = groups.abs().amax(1) / 7
            numbers = (groups / scales[:, None]).round().long() + 8
            zeros = torch.full_like(scales, 7).long()
            tensors[f"{layer}.qweight"] = _packed(numbers.view(-1, len(weight)).T).T.contiguous()
            tensors |= {f"{layer}.scales": scales.bfloat16(), f"{layer}.qzeros": _packed(zeros)}
            tensors[f"{layer}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // 32
        else:
            most, dtype = (127, torch.int8) if kind == "int8" else (448, torch.float8_e4m3fn)
            scales = weight.abs().amax(1, keepdim=True) / most
            numbers = weight / scales
            tensors[name] = (numbers.round() if kind == "int8" else numbers).to(dtype)
            tensors[f"{layer}.weight_scale"] = scales.bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    number = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    how: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": f"{number['type']}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    if kind == "gptq":
        how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return path


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return (N, K) numbers of 4 bits as (N, K / 8) of 32."""
    packed = (numbers.reshape(len(numbers), -1, 8) << torch.arange(0, 32, 4)).sum(2)
    return packed.where(packed < 1 << 31, packed - (1 << 32)).int()


class Answer(NamedTuple):
    """A response.

    Attributes:
        logprobs: (V,) float32 log-probabilities of the first token.
        tokens: The tokens.
        report: kvrag's report; None = there is none.
        ids: The prompt's ids.
    """

    logprobs: torch.Tensor
    tokens: list[int]
    report: dict[str, Any] | None
    ids: list[int]


@dataclass
class Engine:
    """vLLM in this process."""

    llm: LLM
    store: Path | str
    number: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The connector of the worker."""
        return get_kv_transfer_group()

    @property
    def free_blocks(self) -> int:
        """Number of pages that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def submit(
        self, prompt: str | list[int], num_tokens: int = 1, given: Any = None, lora_request: Any = None, **settings: Any
    ) -> str:
        """Add a request without waiting for it."""
        self.number += 1
        name = f"r{self.number}"
        extra = {"extra_args": {"kv_transfer_params": given}} if given is not None else {}
        sampling = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": -1}
        parameters = SamplingParams(**(sampling | extra | settings))
        self.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt,
            parameters,
            lora_request=lora_request,
        )
        return name

    def step(self) -> list[Any]:
        """Run one step; return vLLM's outputs."""
        outputs = self.llm.llm_engine.step()
        for output in outputs:
            if output.finished:
                self.answers[output.request_id] = _answer(output, self.llm)
        return outputs

    def wait(self, *names: str) -> list[Answer]:
        """Run steps until these requests are done."""
        until(self, lambda: all(name in self.answers for name in names))
        return [self.answers[name] for name in names]

    def drain(self) -> None:
        """Run steps until no request is left, aborted ones included."""
        until(self, lambda: not self.scheduler.has_requests())

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.llm.llm_engine.abort_request([name])

    def ask(self, prompt: str | list[int], num_tokens: int = 1, settings: Any = None, **given: Any) -> Answer:
        """Answer a request with these parameters of kvrag."""
        name = self.submit(prompt, num_tokens, {"kvrag": given} if given else None, **(settings or {}))
        return self.wait(name)[0]

    def full(self, prompt: str | list[int], num_tokens: int = 1) -> Answer:
        """Answer a request by full prefill."""
        return self.ask(prompt, num_tokens, mode="off")

    def warm(self, texts: list[str], **given: Any) -> dict[str, Any]:
        """Encode texts."""
        report = self.ask("\n\n".join(texts), mode="warm", texts=texts, **given).report
        assert report is not None
        return report

    def jobs(self) -> dict[str, Any]:
        """The jobs of the worker."""
        return self.connector._runner._jobs


def _answer(output: Any, llm: LLM) -> Answer:
    logprobs = torch.full((llm.llm_engine.model_config.get_vocab_size(),), -torch.inf)
    if output.outputs and output.outputs[0].logprobs:
        for token, each in output.outputs[0].logprobs[0].items():
            logprobs[token] = each.logprob
    report = (output.kv_transfer_params or {}).get("kvrag")
    tokens = list(output.outputs[0].token_ids) if output.outputs else []
    return Answer(logprobs, tokens, report, list(output.prompt_token_ids))


def settings_of(model: Path, store: Path | str, extra: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Arguments of `LLM`."""
    transfer = KVTransferConfig(
        kv_connector="KvragConnector",
        kv_connector_module_path="vllm_kvrag",
        kv_role="kv_both",
        kv_connector_extra_config={"store": str(store), **(extra or {})},
    )
    defaults = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "max_logprobs": -1,
        "num_gpu_blocks_override": 400,
        "disable_log_stats": True,
        "worker_cls": "vllm_kvrag.Worker",
        "kv_transfer_config": transfer,
    }
    return {name: value for name, value in (defaults | changes).items() if value is not None}


@contextmanager
def started(model: Path, store: Path | str, extra: dict[str, Any] | None = None, **changes: Any) -> Iterator[Engine]:
    """vLLM in this process, which is cleaned up afterwards."""
    worker.loaded.clear()
    try:
        with _one_collection():
            engine = Engine(LLM(**settings_of(model, store, extra, **changes)), store)
            try:
                yield engine
            finally:
                engine.llm.llm_engine.engine_core.shutdown()
                del engine
                worker.loaded.clear()
                cleanup_dist_env_and_memory()
    finally:
        worker.loaded.clear()


@contextmanager
def _one_collection() -> Iterator[None]:
    """Collect garbage at the end only: vLLM does so nine times for each engine, among all imported modules."""
    collect, unfreeze = gc.collect, gc.unfreeze
    gc.collect, gc.unfreeze = (lambda generation=2: 0), (lambda: None)
    try:
        yield
    finally:
        gc.collect, gc.unfreeze = collect, unfreeze
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@contextmanager
def reference(model: Path, store: Path | KVStore, **settings: Any) -> Iterator[BlendEngine]:
    """kvrag's own engine."""
    with closing(BlendEngine(Model.from_pretrained(str(model)), store, **settings)) as engine:
        yield engine


def blended(engine: BlendEngine, ids: list[int], ratio: float, policy: str) -> Request:
    """The prompt as kvrag's own engine blends it."""
    return engine.prefill(ids, engine.config.overridden({"ratio": ratio, "policy": policy}))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of log-probabilities, of tokens that are not ruled out by padding of the vocabulary."""
    known = ours.isfinite() & theirs[: len(ours)].isfinite()
    assert known.sum() > 100
    return float((ours - theirs[: len(ours)])[known].abs().max())


def until(engine: Engine, condition: Callable[[], bool], seconds: float = 300) -> None:
    """Run steps until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        engine.step()


def lines(text: str) -> list[dict[str, Any]]:
    """The JSON lines of a script's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@contextmanager
def serving(model: Path, store: Path, log: Path, *arguments: str) -> Iterator[str]:
    """vLLM's OpenAI server in a process of its own; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {"kv_connector": "KvragConnector", "kv_connector_module_path": "vllm_kvrag", "kv_role": "kv_both"}
    config = json.dumps({**transfer, "kv_connector_extra_config": {"store": str(store)}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--max-num-seqs", "8", "--worker-cls", "vllm_kvrag.Worker"]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--kv-transfer-config", config, *arguments], stdout=out, stderr=out, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 300
        while True:
            with suppress(OSError), urlopen(f"{url}/health") as response:
                if response.status == 200:
                    break
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)
