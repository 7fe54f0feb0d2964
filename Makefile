# Everything runs in .venv, which `make` creates. PYTHON may name another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The quickstart needs the program alone: half as many packages.
RUNS := $(VENV)/.runs
# bfloat16 matrix products stop with SIGILL on some CPUs unless oneDNN is kept from their newest instructions.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: help quickstart test test-gpu lint format docs docs-serve bench studies-small studies-medium wire clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

$(STAMP): EXTRA := dev
$(RUNS): EXTRA := train
# Before anything is made of the wrong one, which would stay.
VERSION := import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, %s is %d.%d; name another: make PYTHON=python3.12 ..." % (sys.executable, v[0], v[1]))

$(STAMP) $(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(VERSION)'
	@echo "installing into $(VENV); the first time that takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRA)]"
	touch $(RUNS) $@

quickstart: $(RUNS)  ## train a small language model with two replicas here: two minutes, no download; DATASET=FILE for your own text
	$(BIN)/thinwire train quickstart --replicas 2 $(if $(DATASET),--dataset "$(DATASET)")

# Tracing makes Triton's interpreter twice as slow, so coverage is taken of the tests that are about core and wire. The others
# wait a good deal, for processes and for links, so that two cores have time for three of them.
COVERING := tests/unit/core tests/unit/wire tests/unit/exchange tests/unit/test_optimizer.py tests/contracts tests/numerics/test_oracle.py

test: lint  ## lint, types, all tests that need no GPU, and the coverage of core and wire
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal --cov --cov-report= $(COVERING)
	$(BIN)/python -m coverage report --include='*/thinwire/core/*,*/thinwire/wire/*' --fail-under=95
	$(BIN)/python -m pytest -m "not gpu" -n 3 --dist worksteal --durations=10 $(addprefix --ignore=,$(COVERING))

test-gpu: $(STAMP)  ## the tests that run on a CUDA device
	$(BIN)/python -m pytest -m gpu -rs

lint: $(STAMP)  ## formatting, lint rules and strict types
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy

format: $(STAMP)  ## format the code
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

# So that MkDocs does not speak of its future in between.
export NO_MKDOCS_2_WARNING := 1

docs: $(STAMP)  ## the documentation site, in build/site; a warning is an error
	$(BIN)/python website/cli_reference.py
	$(BIN)/python website/stage.py
	$(BIN)/mkdocs build

docs-serve: docs  ## the same, to be read in a browser on this machine
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site

bench: $(STAMP)  ## CPU step time and memory beside pytorch-optimizer's DeMo; rows under results/
	$(BIN)/python benchmarks/cpu_step.py

studies-small: $(STAMP)  ## run all studies anew in their small size, 9 to 18 minutes on two cores; are conclusions those stored?
	$(BIN)/thinwire study run all --size small --at-once 2 --results runs/studies-small
	$(BIN)/thinwire study compare runs/studies-small

studies-medium: $(STAMP)  ## the same with tuned learning rates and three seeds, some three hours on two cores
	$(BIN)/thinwire study run all --size medium --at-once 2

wire: $(STAMP)  ## bits per coefficient on the wire
	$(BIN)/python -m thinwire.wire

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist runs
