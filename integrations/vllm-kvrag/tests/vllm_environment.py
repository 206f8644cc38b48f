"""Environment variables of vLLM on the CPU, offline. Imported before vLLM, which reads them when it is imported."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # engines run in this process: tests can look into them
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
