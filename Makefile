# Commands of the project. `make demo` and `make test` set up everything they need.
.DEFAULT_GOAL := help
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENGINE ?= vllm
STACK  ?= $(if $(filter sglang,$(ENGINE)),sglang-0.5.23,vllm-ascend-0.23.0)
CI_STACKS := vllm-ascend-0.13.0 sglang-0.5.23
MORE_STACKS := vllm-ascend-0.11.0 vllm-ascend-0.18.0 vllm-ascend-0.26.0rc1 vllm-ascend-0.30.0rc2 vllm-ascend-0.30.0rc2-torch-2.14
RAY_STACKS := vllm-ascend-0.23.0 vllm-ascend-0.13.0
MODEL  ?= Qwen/Qwen3-VL-8B-Instruct
STAMP  := $(VENV)/.installed
NATIVE := $(shell find vllm_memprof/sim/native -name '*.cpp' -o -name '*.h' -o -name '*.c')
DEMO_vllm := --tensor-parallel-size 2 --max-model-len 65536 --max-num-seqs 8 \
	--max-num-batched-tokens 32768 --gpu-memory-utilization 0.95 --mm-processor-cache-gb 0
DEMO_sglang := --tp-size 2 --context-length 65536 --max-running-requests 8

# Bytecode is kept, also where the environment says not to: every engine process would compile its modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo add-stack test test-full test-arm64 checks test-unit test-sim test-fuzz fuzz lint format types bench bench-sample bench-plan bench-sweep accuracy models golden samples check sim sim-all sim-every dist clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

sim: $(STAMP)  ## Set up the simulated device and its engine stack
	$(BIN)/memprof sim setup --stack $(STACK)

sim-all: sim  ## The same, and the other engine stacks that make test runs
	for stack in $(CI_STACKS); do $(BIN)/memprof sim setup --stack $$stack || exit 1; done

sim-every: sim-all  ## The same, and those that make test-full alone runs
	for stack in $(MORE_STACKS); do $(BIN)/memprof sim setup --stack $$stack || exit 1; done
	for stack in $(RAY_STACKS); do $(BIN)/memprof sim setup --stack $$stack --with ray || exit 1; done

demo: sim  ## From a bare machine to the first profile: Qwen3-VL-8B, TP=2, on a simulated Ascend 910B; ENGINE=sglang runs SGLang
	$(BIN)/memprof offline $(MODEL) --engine $(ENGINE) --device sim:910b --stack $(STACK) $(DEMO_$(ENGINE)) --prompt "Where did the memory go?"

add-stack: $(STAMP)  ## Lock, set up and check a release of vllm-ascend: RELEASE=0.26.0rc1 (docs/develop/add-a-stack.md)
	$(BIN)/python -m scripts.add_stack $(RELEASE) $(ARGS)

test: $(STAMP)  ## Everything CI runs: lint, types, unit tests, shim tests, the real engine on the simulated device
	@echo "set-up of the engine stacks beside lint and unit tests: each prints when it has ended, the last in some five minutes"
	$(MAKE) -j3 --output-sync=target sim-all checks
	$(MAKE) test-sim

checks: lint test-unit test-fuzz  ## What needs no engine: lint, types, unit tests, damaged logs

test-full: sim-every  ## What CI leaves out, because other tests come through the same code
	$(BIN)/python -m pytest -n 2 -m full tests/unit scripts/tests
	MEMPROF_REQUIRE_SIM=1 $(BIN)/python -m pytest -m "alone and full" tests/integration
	MEMPROF_REQUIRE_SIM=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "full and not alone" tests/integration

test-arm64: sim  ## Plans on an emulated aarch64, each byte compared with those here (root, Debian, an hour); ARGS="--folder DIR"
	nice -n 19 $(BIN)/python -m scripts.arm64 --stack $(STACK) $(ARGS)

test-unit: $(STAMP)  ## Unit tests: no engine, no device
	$(BIN)/python -m pytest -n 3 -m "not full" --durations=20 tests/unit tests/golden scripts/tests

test-fuzz: $(STAMP)  ## Half a minute of damaged logs from a fixed seed, so that a failure can be had again
	$(BIN)/python -m tests.support.fuzz_explain --seed 0 --seconds 30

fuzz: $(STAMP)  ## A minute from a seed that no run had before
	$(BIN)/python -m tests.support.fuzz_explain --seconds 60

test-sim: sim-all  ## Shim tests and the real engines on the simulated device
	MEMPROF_REQUIRE_SIM=1 $(BIN)/python -m pytest -m "alone and not full" tests/shim tests/integration
	MEMPROF_REQUIRE_SIM=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not full and not alone" --durations=20 tests/shim tests/integration

lint: $(STAMP)  ## ruff, codespell, mypy, clang-format, size of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell vllm_memprof tests scripts docs README.md CHANGELOG.md Makefile
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/python scripts/size.py --check

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: sim  ## Cost of the observer: start-up time with and without memprof, interleaved
	$(BIN)/python scripts/bench_overhead.py

bench-sample: sim  ## Cost of one sample of a run that serves, in processor time
	$(BIN)/python scripts/bench_sample.py

bench-plan: sim  ## Seconds of plans that are forks of a warm process, beside cold ones (half an hour)
	$(BIN)/python -m scripts.bench_warm --sweep 100

bench-sweep: sim  ## Milliseconds of a plan from the cache, seconds to open a page of 1,000 plans
	$(BIN)/python -m scripts.bench_sweep

accuracy: sim-every  ## Plan every published run on the simulated device anew (an hour); docs/accuracy.md
	$(BIN)/python -m scripts.accuracy --run --again

models: sim-every  ## Plan the presets of docs/models.md that were not, or with other constants (an hour for all)
	$(BIN)/python -m scripts.bench_plan --models

golden: $(STAMP)  ## Rewrite the golden files; read the diff before you commit it
	$(BIN)/python -m pytest tests/golden --update-golden

samples: $(STAMP)  ## Rewrite reports/: a sample of each report format, and screenshots where there is a Chromium
	$(BIN)/python -m scripts.make_samples

check:  ## What CI runs
	bash .ci/run

dist: $(STAMP)  ## The wheel and the source distribution, in dist/; twice built they are equal
	$(BIN)/python -m hatchling build -d dist

clean:  ## Remove the virtual environment and caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
