# `make help` lists the targets. Everything is installed into $(VENV); nothing outside the checkout is changed but caches.
#
# Variables: PYTHON makes the virtual environment (default python3), VENV is its folder (empty: use PYTHON as it is, with
# what it has installed), CXX the C++ compiler.

PYTHON ?= python3
VENV ?= .venv
RUN_PYTHON := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
RUNTIME_STAMP := $(if $(VENV),$(VENV)/.runtime-installed)
DEVELOPMENT_STAMP := $(if $(VENV),$(VENV)/.development-installed)
PIP := $(RUN_PYTHON) -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build demo test test-sanitize lint bench clean help

include custom_ops/custom_ops.mk
include custom_ops/tests/sanitize.mk

build: $(RUNTIME_STAMP)  ## build the custom ops for this machine
	@$(MAKE) -s --no-print-directory -j$(shell nproc 2>/dev/null || echo 2) custom-ops
	@$(RUN_PYTHON) -c "from poptransformer.backends.xla.custom_ops import load_cpu_library as load; \
	  library = load(); print('✓ cpu custom ops:', ', '.join(library.ops), f'({library.instructions}, {library.num_threads} threads)')"

demo: build  ## generate text with the small GPT-2 in examples/gpt2/gpt2-pocket
	$(RUN_PYTHON) examples/gpt2/inference.py

# Without a network the tests that need the model say so and are skipped; continuous integration insists on it.
test: lint build $(DEVELOPMENT_STAMP)  ## lint, build, fetch a small model (98 MB, once) and run all tests
	@$(RUN_PYTHON) -m poptransformer.checkpoint.fetch smollm2 || test -z "$$CI"
	$(RUN_PYTHON) -m pytest -q -n auto --maxprocesses=4 --dist loadfile $(PYTEST_ARGS)

test-sanitize:  ## test the kernels in C++ with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	@$(MAKE) -s --no-print-directory -j$(shell nproc 2>/dev/null || echo 2) sanitize

lint: $(DEVELOPMENT_STAMP)  ## check style and common mistakes with ruff
	$(RUN_PYTHON) -m ruff check .
	$(RUN_PYTHON) -m ruff format --check .

bench: build $(DEVELOPMENT_STAMP)  ## measure decode speed of the GPT-2-124M shape beside Hugging Face
	$(RUN_PYTHON) benchmarks/bench_generate.py --shape gpt2-124m

clean: clean-custom-ops  ## remove what was built and cached (the virtual environment stays)
	rm -rf outputs multirun .pytest_cache .ruff_cache .hypothesis

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' $(firstword $(MAKEFILE_LIST)) | column -t -s:

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

ifneq ($(VENV),)
$(RUNTIME_STAMP): requirements.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e .
	@touch $@

$(DEVELOPMENT_STAMP): requirements-dev.txt $(RUNTIME_STAMP)
	$(PIP) install -r requirements-dev.txt
	@touch $@
endif
