"""llama.cpp's library, by ctypes: found, tried out in a child process, and loaded once.

The structs are those of builds around b11549. llama.h has no version of them, so the defaults that the library returns
are compared with what they must be: a build with other structs is refused.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvrag.errors import ModelLoadError

VARIABLE = "KVRAG_LLAMA"
"""Environment variable with the path of the library."""

_INSTALL = "pip install 'kvrag[llama]'"
_TESTED = "pip install xllamacpp==2026.10.11549"
_PLACES = {"xllamacpp": ("*.so", "*.pyd"), "llama_cpp": ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll")}
_LEVEL_ERROR = 4
_AUTO = -1

# a product of matrices, for the instructions that the library was built for, and the form of tensors; then a file,
# since llama.cpp ends the process if tokens occur twice, or the header contradicts itself
_TRIAL = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
class Memory(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]
for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph"):
    getattr(lib, name).restype = ctypes.c_void_p
lib.ggml_new_tensor_2d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
lib.ggml_mul_mat.argtypes = [ctypes.c_void_p] * 3
lib.ggml_new_graph.argtypes = [ctypes.c_void_p]
lib.ggml_build_forward_expand.argtypes = [ctypes.c_void_p] * 2
lib.ggml_graph_compute_with_ctx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
lib.ggml_init.argtypes = [Memory]
lib.llama_backend_init()
memory = lib.ggml_init(Memory(1 << 24, None, False))
matrix = lib.ggml_new_tensor_2d(memory, 0, 64, 64)
product = lib.ggml_mul_mat(memory, matrix, matrix)
graph = lib.ggml_new_graph(memory)
lib.ggml_build_forward_expand(graph, product)
lib.ggml_graph_compute_with_ctx(memory, graph, 1)
if list((ctypes.c_void_p * 2).from_address(product + 152)) != [matrix, matrix]:
    sys.exit("its tensors are of another form")
print("the library works", flush=True)
from kvrag.backend.llama import library
try:
    library.Loaded(library._load(sys.argv[1]), *sys.argv[2:], n_gpu_layers=0, use_extra_bufts=False)
except library.ModelLoadError:
    pass  # said by the other process
"""


def _fields(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a struct, written as type and names in each line."""
    kinds = {"int": c_int32, "uint": c_uint32, "float": c_float, "bool": c_bool, "pointer": c_void_p, "size": c_size_t}
    rows = (line.split() for line in text.strip().splitlines())
    return [(name, kinds[kind]) for kind, *names in rows for name in names]


class ModelParams(Structure):
    """`llama_model_params`."""

    _fields_ = _fields("""
        pointer devices tensor_buft_overrides
        int n_gpu_layers split_mode load_mode lazy_mode main_gpu
        pointer tensor_split progress_callback progress_callback_user_data kv_overrides
        bool vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp
    """)


class ContextParams(Structure):
    """`llama_context_params`."""

    _fields_ = _fields("""
        uint n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq
        int n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type
        float rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow
        uint yarn_orig_ctx
        float defrag_thold
        pointer cb_eval cb_eval_user_data
        int type_k type_v
        size moe_cache_size
        pointer abort_callback abort_callback_data
        bool embeddings offload_kqv no_perf op_offload swa_full kv_unified
        pointer samplers
        size n_samplers
        pointer ctx_other
    """)


class LlamaBatch(Structure):
    """`llama_batch`."""

    _fields_ = (
        *(("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32))),
        *(("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8))),
    )


class GraphTensor(Structure):
    """The first part of `ggml_tensor`."""

    _fields_ = (
        *(("type", c_int32), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("op", c_int32)),
        *(("op_params", c_int32 * 16), ("flags", c_int32), ("sources", c_void_p * 10)),
    )


EvalCallback = ctypes.CFUNCTYPE(c_bool, POINTER(GraphTensor), c_bool, c_void_p)

# defaults by which a build with other structs is found out
_DEFAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama_model_default_params", {"split_mode": 1, "main_gpu": 0, "vocab_only": False, "use_extra_bufts": True}),
    (
        "llama_context_default_params",
        {"n_ctx": 512, "n_seq_max": 1, "pooling_type": _AUTO, "flash_attn_type": _AUTO, "rope_freq_base": 0.0}
        | {"yarn_ext_factor": _AUTO, "type_k": 1, "type_v": 1, "abort_callback": None, "offload_kqv": True}
        | {"kv_unified": False, "n_samplers": 0, "ctx_other": None},
    ),
)

_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, and then arguments
    "llama_backend_init": (None,),
    "llama_log_set": (None, c_void_p, c_void_p),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_n_layer": (c_int32, c_void_p),
    "llama_model_n_params": (c_size_t, c_void_p),
    "llama_model_n_swa": (c_int32, c_void_p),
    "llama_model_is_recurrent": (c_bool, c_void_p),
    "llama_model_is_hybrid": (c_bool, c_void_p),
    "llama_model_has_encoder": (c_bool, c_void_p),
    "llama_supports_gpu_offload": (c_bool,),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_vocab_type": (c_int32, c_void_p),
    "llama_vocab_get_text": (c_char_p, c_void_p, c_int32),
    "llama_vocab_get_attr": (c_int32, c_void_p, c_int32),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_vocab_bos": (c_int32, c_void_p),
    "llama_vocab_eos": (c_int32, c_void_p),
    "llama_vocab_pad": (c_int32, c_void_p),
    "llama_vocab_get_add_bos": (c_bool, c_void_p),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    "llama_token_to_piece": (c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_batch_init": (LlamaBatch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, LlamaBatch),
    "llama_decode": (c_int32, c_void_p, LlamaBatch),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_memory_seq_cp": (None, c_void_p, c_int32, c_int32, c_int32, c_int32),
    "llama_memory_seq_pos_max": (c_int32, c_void_p, c_int32),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_state_seq_get_size": (c_size_t, c_void_p, c_int32),
    "llama_state_seq_get_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "llama_state_seq_set_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "ggml_is_empty": (c_bool, POINTER(GraphTensor)),
    "ggml_op_desc": (c_char_p, POINTER(GraphTensor)),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
}


class Library(NamedTuple):
    """A loaded library: its functions, and the errors that it has logged."""

    functions: Any
    errors: deque[str]
    logger: Any  # the callback, which must live as long

    def reason(self) -> str:
        """Return the first error that was logged since the last one was asked for."""
        first = self.errors[0] if self.errors else "no reason given"
        self.errors.clear()
        return first.partition("error loading model: ")[2][:160] or first[:160]


class Loaded:
    """A loaded model, which is freed with this."""

    def __init__(self, library: Library, name: str, file: Path, **changes: Any) -> None:
        """See `load`."""
        self.library, lib = library, library.functions
        params = lib.llama_model_default_params()
        for key, value in changes.items():
            setattr(params, key, value)
        self.pointer = lib.llama_model_load_from_file(os.fsencode(file), params)
        if not self.pointer:
            raise ModelLoadError(f"cannot load model {name!r}: llama.cpp: {library.reason()}")
        weakref.finalize(self, lib.llama_model_free, self.pointer)
        self.vocabulary: int = lib.llama_model_get_vocab(self.pointer)
        self.num_vocab: int = lib.llama_vocab_n_tokens(self.vocabulary)


def find() -> Path | None:
    """Return the path of the library: the one in the environment, or that of an installed package."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    for package, patterns in _PLACES.items():
        spec = find_spec(package)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        for path in (path for folder in folders for pattern in patterns for path in folder.glob(pattern)):
            return path
    return None


def load(name: str, file: Path, **changes: Any) -> Loaded:
    """Load a model's file with changed parameters.

    Raises ModelLoadError if there is no library that works here, or it cannot read the file.
    """
    path = find()
    if path is None:
        raise ModelLoadError(f"GGUF files need llama.cpp's library: {_INSTALL}, or pass the model's original files")
    _try_out(path, name, file, file.stat().st_mtime)
    return Loaded(_load(path), name, file, **changes)


@cache
def _try_out(path: Path, name: str, file: Path, _: float) -> None:
    """Raise ModelLoadError if the library or the file would end this process."""
    command = [sys.executable, "-c", _TRIAL, str(path), name, str(file)]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, errors="replace")
    reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    if done.returncode and done.stdout:
        reason = f"llama.cpp aborts on it ({Path(reason).name[:160]}): use another file of it"
        raise ModelLoadError(f"cannot load model {name!r}: {reason}")
    if done.returncode:
        raise _refusal(path, "it was built for other processors" if done.returncode == -signal.SIGILL else reason)


@cache
def _load(path: Path) -> Library:
    functions = ctypes.CDLL(str(path))
    try:
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _refusal(path, str(error)) from error
    for name, expected in _DEFAULTS:
        params = getattr(functions, name)()
        if other := [key for key, value in expected.items() if getattr(params, key) != value]:
            raise _refusal(path, f"its {other[0]} is not where b11549 has it")
    errors = deque[str](maxlen=8)

    def log(level: int, text: bytes, _: object) -> None:
        if level == _LEVEL_ERROR and (line := text.decode(errors="replace").strip()):
            errors.append(line)

    logger = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(log)
    functions.llama_log_set(logger, None)
    functions.llama_backend_init()
    return Library(functions, errors, logger)


def _refusal(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"llama.cpp's library {path} cannot be used ({reason[:200]}): {_TESTED}, or set {VARIABLE}")
