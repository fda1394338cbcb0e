# Three commands: `make compare`, `make test` and `make quick`. They set up what they need under .venv/.
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
LIGHT := $(VENV)/light
TRITON := $(VENV)/triton
# In a folder of this name: of modules elsewhere hypothesis reads all sources for their constants.
SITES := build/site-packages
CORE_019 := $(SITES)/megatron-core-0.19.2
BRIDGE_SITE := $(SITES)/megatron-bridge-0.3.1
BRIDGE_MAIN := $(SITES)/bridge-main
TE := $(SITES)/transformer-engine-2.20.2
# A machine whose Python already has torch with CUDA keeps that torch.
HAS_CUDA := $(shell $(PYTHON) -c "import torch; print(torch.cuda.is_available())" 2>/dev/null)
export TORCHDYNAMO_DISABLE := 1
export OMP_NUM_THREADS := 1
# Of the tests' many processes only the first compiles this package.
unexport PYTHONDONTWRITEBYTECODE
# A target says itself which megatron-core it runs on, where it is not the .venv's.
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help compare results examples recorded measured offload-recipes quick quick-search quick-others quick-lint test test-core-016 test-core-019 test-once test-shown test-planner test-bridge test-te gpu-dry-run wheel lint megatron-lm-checks bridge-checks bridge-hybrid-checks bridge-recipes published-steps reference docs clean

## List these targets.
help:
	@awk '/^## / {text = text substr($$0, 3); next} /^[a-z][a-z-]*:/ && text { \
	    sub(":.*", "", $$1); printf "%-20s%s\n", $$1, text; text = ""}' $(firstword $(MAKEFILE_LIST))

## Run Megatron under its own strategies and ours, on this machine; print the table, and where the
## report of our plan is.
compare: $(INSTALLED)
	$(BIN)/python scripts/compare_policies.py --output build/compare $(ARGS)

## Measure again what the README quotes, and quote it.
results: $(INSTALLED)
	$(BIN)/python scripts/compare_policies.py --output benchmarks/results/cpu $(ARGS)
	$(BIN)/python scripts/quote_results.py

## Run the examples of planning without a device again, and quote what they print. Takes minutes.
NO_DEVICE := benchmarks/results/no_device
PLANNED := build/no_device
EXAMPLES := llama3-70b llama31-405b deepseek-v3
# The .venv's megatron-core 0.16 has no HybridModel. Nemotron 3 Nano's layers are CUDA graphs, which
# `verify` cannot run.
HYBRIDS := llama3-70b-hybrid nemotron-3-nano nemotron-3-super nemotron-h-56b
SETTINGS := none $(patsubst %,'selective[%]',core_attn layernorm moe_act layernorm+moe_act \
    shared_experts moe layernorm+moe)
WITH_019 := PYTHONPATH=$(CURDIR)/$(CORE_019)
examples: export PATH := $(CURDIR)/$(BIN):$(PATH)
examples: export PYTHONWARNINGS := ignore
examples: $(TRITON) $(CORE_019)
	mkdir -p $(NO_DEVICE)
	scripts/plan_examples.sh $(PLANNED) $(EXAMPLES) > $(NO_DEVICE)/plans.txt
	$(WITH_019) scripts/plan_examples.sh $(PLANNED) $(HYBRIDS) > $(NO_DEVICE)/hybrid-plans.txt
	$(WITH_019) $(BIN)/python scripts/settings.py megatron_autorecompute/examples/nemotron-3-nano.yaml \
	    $(PLANNED)/nemotron-3-nano.json $(SETTINGS) > $(NO_DEVICE)/nemotron-3-nano-settings.txt
	scripts/plan_examples.sh $(PLANNED) qwen3-30b-a3b-grpo \
	    | sed -n '/up to tokens/,/^[^ ]/{s/^ \(.*[^ ]\) *$$/\1/p}' > $(NO_DEVICE)/lengths.txt
	for job in $(filter-out nemotron-3-nano,$(HYBRIDS)); do \
	    echo $$job && $(WITH_019) megatron-autorecompute verify $(PLANNED)/$$job.plan.json || exit; \
	done > $(NO_DEVICE)/hybrid-verified.txt
	megatron-autorecompute report $(PLANNED)/llama31-405b.plan.json
	$(BIN)/python scripts/screenshot.py $(PLANNED)/llama31-405b.plan.html docs/pictures/report.png
	for job in $(EXAMPLES); do \
	    echo $$job && megatron-autorecompute verify $(PLANNED)/$$job.plan.json || exit; \
	done > $(NO_DEVICE)/verified.txt
	$(BIN)/python scripts/nvidia_recipes.py
	$(BIN)/python scripts/quote_results.py

## Record the profiles that the package carries, and what README and docs show of one. Takes a minute.
recorded: export PATH := $(CURDIR)/$(BIN):$(PATH)
recorded: $(TRITON)
	mkdir -p $(PLANNED)
	for job in $(EXAMPLES); do \
	    megatron-autorecompute estimate --gpu h100-80gb --example $$job \
	        -o megatron_autorecompute/examples/$$job.h100-80gb.json > $(PLANNED)/$$job.txt || exit; \
	done
	megatron-autorecompute plan --example llama3-70b --gpu h100-80gb > $(NO_DEVICE)/first.txt
	megatron-autorecompute plan --example llama3-70b --gpu h100-80gb -o $(PLANNED)/first.plan.json > /dev/null
	megatron-autorecompute show $(PLANNED)/first.plan.json --svg docs/pictures/policy.svg
	megatron-autorecompute pareto --profile $(PLANNED)/first.plan.json --plot docs/pictures/curve.svg
	$(BIN)/python scripts/quote_results.py

## Hold predictions against every published measurement: docs/measured-runs.md. Takes minutes.
measured: $(TRITON) $(CORE_019)
	PYTHONPATH=$(CORE_019) $(BIN)/python -m benchmarks.measured $(ARGS)

## Hold NVIDIA's recipes that offload against the planner: benchmarks/results/offload_recipes.md. Takes minutes.
offload-recipes: $(TRITON) $(CORE_019)
	PYTHONPATH=$(CORE_019) $(BIN)/python scripts/offload_recipes.py $(ARGS)

## What needs neither torch nor Megatron, in a minute: words, planner, rules, lint.
quick: $(LIGHT)
	$(MAKE) --jobs=2 --keep-going quick-others quick-search quick-lint

QUICK := $(BIN)/python -m pytest --quiet -m "not long"

quick-search:
	$(QUICK) tests/planner/search tests/words $(ARGS)

quick-others:
	$(QUICK) tests/planner --ignore=tests/planner/search $(ARGS)

# Types of what imports torch are checked by `lint`.
quick-lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron_autorecompute/planner
	$(QUICK) tests/rules $(ARGS)

## Run all tests: both supported versions of megatron-core, Megatron Bridge, lint, types and rules.
test:
	@mkdir -p build && rm -f build/test-*.log
	$(MAKE) --jobs=2 --keep-going test-planner test-core-016 test-core-019 test-shown test-bridge \
	    test-te test-once lint || \
	    { grep -E '^(FAILED|ERROR) ' build/test-*.log || echo 'No test failed: see lint above.'; exit 1; }

# Two of these at a time, and what they need: first what runs while torch is installed, then the
# longest. Every line says whose it is, and what failed is said again at the end. Without what
# triton's bindings (nanobind) say at every end.
UNSAID = /^nanobind: \|^See https:..nanobind\|^ - leaked \|^ - ... skipped remainder/d
OF = 2>&1 | sed --unbuffered '$(UNSAID)' | tee build/$@.log | sed --unbuffered 's/^/$(1): /'

# What meets Megatron, and asks something of its version.
MEETS_MEGATRON := $(addprefix tests/, compat runtime meta compare pretrain)

test-core-016: $(TRITON)
	$(BIN)/python -m pytest $(MEETS_MEGATRON) -m "not newest_version" $(ARGS) \
	    $(call OF,core 0.16.1)

test-core-019: $(TRITON) $(CORE_019)
	PYTHONPATH=$(CORE_019) $(BIN)/python -m pytest $(MEETS_MEGATRON) \
	    tests/benchmarks/test_measured.py tests/benchmarks/test_measured_times.py \
	    tests/benchmarks/test_frontier.py tests/benchmarks/test_settings.py \
	    tests/one_device/test_profiling.py -m "not any_version" $(ARGS) \
	    $(call OF,core 0.19.2)

PLANNER := tests/planner tests/words

# Needs neither torch nor Megatron.
test-planner: $(LIGHT)
	$(BIN)/python -m pytest $(PLANNER) $(ARGS) $(call OF,planner)

SHOWN := tests/cli tests/report

test-shown: $(TRITON)
	$(BIN)/python -m pytest $(SHOWN) -m "not newest_version" $(ARGS) $(call OF,shown)

# All other tests.
test-once: $(TRITON)
	$(BIN)/python -m pytest tests --ignore=tests/rules --ignore=tests/transformer_engine \
	    $(addprefix --ignore=,$(MEETS_MEGATRON) $(PLANNER) $(SHOWN)) -m "not newest_version" $(ARGS) \
	    $(call OF,once)

## Test Transformer Engine 2.20's own Python on CPU: torch stands for its C++ extension.
test-te: $(TRITON) $(CORE_019) $(TE)
	PYTHONPATH=$(CORE_019):$(TE) $(BIN)/python -m pytest tests/transformer_engine $(ARGS) \
	    $(call OF,TE 2.20.2)

$(TE): constraints/transformer-engine.txt | $(BIN)/python
	mkdir -p $(SITES)
	rm -rf $@.part $@
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $@.part \
	    --requirement constraints/transformer-engine.txt
	mv $@.part $@

## What runs on a GPU, as far as CPU can: its tests, and every part that needs no checkout.
gpu-dry-run: $(TRITON) $(CORE_019)
	PYTHONPATH=$(CORE_019) GPU_TESTS_ANYWHERE=1 $(BIN)/python -m pytest tests/gpu $(ARGS)
	PYTHONPATH=$(CORE_019) $(BIN)/python -m benchmarks.gpu.run --tiny --only 1 --only 2 --only 3 \
	    --only 5 --only 6 --only 10 --only 11

## Build the wheel and try it in an empty environment of every Python from 3.10 to 3.13 on PATH.
wheel: $(INSTALLED)
	$(BIN)/python scripts/try_wheel.py $(ARGS)

## Lint, format, types, and the rules that tests/rules hold.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/rules

$(BIN)/python:
	$(PYTHON) -m venv $(if $(filter True,$(HAS_CUDA)),--system-site-packages) $(VENV)

$(LIGHT): pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev]'
	touch $@

# torch is pinned in the constraints: any other request for it would bring CUDA's packages along.
# What is imported of it is compiled then: compiling all of it takes as long as its installation.
$(INSTALLED): $(LIGHT)
ifneq ($(HAS_CUDA),True)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints/cpu.txt torch
endif
	$(BIN)/python -m pip install --quiet --no-deps megatron-core==0.16.1
	touch $@

# megatron-core 0.19 and Bridge import it.
$(TRITON): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints/cpu.txt triton
	touch $@

# The 0.19.2 wheel asks for Python 3.12; its sources run on 3.11.
$(CORE_019): | $(BIN)/python
	mkdir -p $(SITES)
	$(BIN)/python -m pip install --quiet --no-deps --no-binary megatron-core \
	    --ignore-requires-python --target $@.part megatron-core==0.19.2
	mv $@.part $@

## Run the real pretrain_gpt.py of a checkout with and without a policy, on CPU:
## make megatron-lm-checks MEGATRON_LM=path/to/checkout
megatron-lm-checks: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt six regex pyyaml
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) $(BIN)/python -m pytest tests/pretrain $(ARGS)

# Bridge's own tests that touch recompute, configs and callbacks, in a checkout of v0.3.1.
BRIDGE_TESTS := $(addprefix tests/unit_tests/, training/test_callbacks.py \
    training/test_comm_overlap.py training/test_config.py training/utils/test_omegaconf_utils.py \
    utils/test_instantiate_utils.py recipes/test_llama_recipes.py peft/test_recompute.py)
# These two fail without CUDA with or without this package.
BRIDGE_KNOWN := $(addprefix --deselect=tests/unit_tests/training/test_config.py::, \
    TestConfigContainerValidation::test_modelopt_requires_no_gradient_accumulation_fusion \
    TestMixedPrecisionConsistencyValidation::test_validation_called_during_container_validate)

## Test Megatron Bridge 0.3.1 with the field, on CPU.
test-bridge: $(TRITON) $(BRIDGE_SITE)
	PYTHONPATH=$(CURDIR)/$(BRIDGE_SITE) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/bridge $(ARGS) \
	    $(call OF,bridge 0.3.1)

## Train and plan with hybrid providers of a newer Bridge and Megatron, on CPU:
## make bridge-hybrid-checks BRIDGE=path/to/checkout MEGATRON_LM=path/to/checkout
bridge-hybrid-checks: $(TRITON) $(BRIDGE_MAIN)
	@test -d "$(BRIDGE)/src/megatron/bridge/models/hybrid" -a -d "$(MEGATRON_LM)/megatron/core" || { echo \
	    "BRIDGE=PATH of a Megatron-Bridge after 0.5, MEGATRON_LM=PATH of the Megatron-LM it pins"; exit 2; }
	$(WITH_BRIDGE_MAIN) $(BIN)/python -m pytest tests/bridge/test_hybrid.py \
	    tests/bridge/test_tower.py $(ARGS)

HAS_PERF_RECIPES = test -d "$(BRIDGE)/src/megatron/bridge/perf_recipes" -a -d "$(MEGATRON_LM)/megatron/core" || { echo \
    "BRIDGE=PATH of a Megatron-Bridge after 0.5, MEGATRON_LM=PATH of the Megatron-LM it pins"; exit 2; }
WITH_BRIDGE_MAIN = PYTHONPATH=$(CURDIR):$(abspath $(BRIDGE))/src:$(abspath $(MEGATRON_LM)):$(CURDIR)/$(BRIDGE_MAIN) \
    HF_HUB_OFFLINE=1

## Hold the settings of Bridge's performance recipes against their devices' memory, without a device:
## make bridge-recipes BRIDGE=path/to/checkout MEGATRON_LM=path/to/checkout
bridge-recipes: $(TRITON) $(BRIDGE_MAIN)
	@$(HAS_PERF_RECIPES)
	$(WITH_BRIDGE_MAIN) $(BIN)/python -m benchmarks.bridge_recipes $(ARGS)

## Hold predicted steps of the same recipes against NVIDIA's published ones: docs/published-steps.md.
## make published-steps BRIDGE=path/to/checkout MEGATRON_LM=path/to/checkout
published-steps: $(TRITON) $(BRIDGE_MAIN)
	@$(HAS_PERF_RECIPES)
	$(WITH_BRIDGE_MAIN) $(BIN)/python -m benchmarks.published $(ARGS)

$(BRIDGE_MAIN): $(TRITON) constraints/bridge-main.txt
	mkdir -p $(SITES)
	rm -rf $@.part $@
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints/bridge-main.txt --target $@.part
	mv $@.part $@

## Run Bridge's own unit tests with the field in place: make bridge-checks BRIDGE=/path/to/checkout
bridge-checks: $(TRITON) $(BRIDGE_SITE)
	@test -d "$(BRIDGE)/tests/unit_tests" || { echo \
	    "BRIDGE='$(BRIDGE)' is no checkout of Megatron-Bridge v0.3.1: make bridge-checks BRIDGE=PATH"; exit 2; }
	cd $(BRIDGE) && PYTHONPATH=$(CURDIR)/tests/bridge:$(CURDIR)/$(BRIDGE_SITE) HF_HUB_OFFLINE=1 \
	    $(CURDIR)/$(BIN)/python -m pytest -q -p with_field -p no:cacheprovider -o addopts= -W ignore \
	    $(BRIDGE_KNOWN) $(BRIDGE_TESTS)

# Without their dependencies: megatron-bridge asks for packages that compile CUDA code. Of these
# many modules the tests import, and so compile, few.
$(BRIDGE_SITE): constraints/bridge.txt | $(BIN)/python
	mkdir -p $(SITES)
	rm -rf $@.part $@
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --requirement constraints/bridge.txt \
	    --target $@.part
	mv $@.part $@
	touch $@

## Write what pages of docs/ take from the code: fields of files, commands, exit codes.
reference: $(INSTALLED)
	$(BIN)/python scripts/reference.py

SPHINX := $(VENV)/sphinx

## Build docs/ as a site in build/site, and check every link and anchor of it.
docs: $(SPHINX)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky \
	    --conf-dir scripts/site docs build/site
	cp build/site/README.html build/site/index.html

$(SPHINX): pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt sphinx myst-parser furo
	touch $@

## Remove the environment and everything that was built.
clean:
	rm -rf $(VENV) build
