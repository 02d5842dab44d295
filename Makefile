# One command sets up, one tests. Everything lands in .venv; nothing outside this folder changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
TESTS_STAMP := $(VENV)/.ready-tests
# DeepSpeed rebuilds its ops when it meets another ninja than the one that built them.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
# Installers leave compiling Python to the first import; each process would do it for seconds.
unexport PYTHONDONTWRITEBYTECODE
# A third worker uses what two leave on two cores, since tests wait; idle threads sleep.
TEST_WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
RESULTS ?= results
SOURCES := src configs launch parse plots dataset benchmarks ds_config examples

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests test test-all test-fast lint fmt golden equality smoke bench-host bench-gpu gpu-check wheelhouse plan guide dataset dataset-oscar third-party compat clean ci-requirements ci

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## environment in .venv for the main job, DeepSpeed's ops built into it

setup-tests: $(TESTS_STAMP) ## on top of it what tests and checks need

INSTALLER_FILES := $(addprefix requirements/,setup.sh uv.txt uv_command.py pins.py other_wheels.py)
$(STAMP): requirements/run.txt requirements/gpu.txt pyproject.toml $(INSTALLER_FILES)
	@PYTHON="$(PYTHON)" bash requirements/setup.sh $(VENV)
	@touch $@

$(TESTS_STAMP): $(STAMP) requirements/dev.txt
	@PYTHON="$(PYTHON)" bash requirements/setup.sh $(VENV) tests
	@touch $@

# What a set-up that was cut off leaves is no environment, whatever stamps it has.
ifneq ($(wildcard $(VENV)/.unfinished),)
.PHONY: $(STAMP) $(TESTS_STAMP)
endif

test: setup-tests ## set up and pass every test
	$(PYTEST) -m "not exhaustive"

lint: setup-tests ## format, lint, types, import rules, shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/shellcheck $$(git ls-files '*.sh') .ci/run

test-all: setup-tests ## every test on every size and number of ranks
	$(PYTEST)

test-fast: setup-tests ## the tests that take seconds
	$(BIN)/pytest -q -m "not slow"

fmt: setup-tests ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: setup-tests ## rewrite golden files and the table of keys in docs/plugin.md (review the diff)
	GOLDEN_REWRITE=1 $(BIN)/pytest -q tests/unit -k golden

equality: setup-tests ## every feature, policy and number of ranks against stock; writes docs/equality.csv (half an hour)
	EQUALITY_FULL=1 $(BIN)/pytest -q tests/integration/engine/test_equality.py

dataset: setup ## token files of the embedded corpus
	$(BIN)/python -m dataset prepare

dataset-oscar: setup ## the paper's corpus, fetched and tokenized
	$(BIN)/python -m dataset prepare oscar-1gb

smoke: setup ## the main job: stock and three policies of the plugin (two without a GPU), report
	bash master-script.sh

bench-host: setup ## our host pass and update beside stock's, on this CPU (3 minutes)
	$(BIN)/python -m benchmarks.host $(ARGS)

bench-gpu: setup ## every way to offload beside stock's, on one GPU (8 minutes, or ARGS="--minutes 20")
	bash master-script.sh --study peers --sweep gpu --results-dir $(RESULTS) $(or $(ARGS),--minutes 8)

# Needs no set-up: it installs from wheels and builds what lacks.
gpu-check: ## what to run first on a machine with a GPU, part by part (docs/gpu-check.md)
	@env -u TORCH_EXTENSIONS_DIR $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check $(ARGS)

wheelhouse: ## wheels for a machine without a network: make wheelhouse ARGS="DIR --python 3.12"
	@PYTHON="$(PYTHON)" bash requirements/wheelhouse.sh $(ARGS)

plan: setup ## predict a run: make plan ARGS="--model 20B --machine h100x4"
	$(BIN)/python -m deep_optimizer_states plan $(ARGS)

compat: setup-tests ## every supported DeepSpeed, Python and megatron-core (hours; ARGS="-l" lists the sessions)
	$(BIN)/nox $(ARGS)

third-party: ## fetch other projects' code at its pinned commits (NAME=... for some of it)
	$(PYTHON) third_party/fetch.py $(NAME)

clean: ## remove what was built (not results)
	rm -rf $(VENV) .nox build dataset/cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

ci-requirements: setup ## what CI adds: Triton, which torch's builds for CPUs lack
	@# One that is there was matched to its torch.
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(BIN)/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/ci.txt

ci: ci-requirements ## what CI runs
	$(MAKE) lint
	$(MAKE) test
