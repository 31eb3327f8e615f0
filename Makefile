# Two commands do everything: `make demo` and `make test`. Each makes its own environment in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEXT ?= please open the old gate
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TEXT  # through the environment: quotes in it are characters, not shell

.DEFAULT_GOAL := help

help: ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

env: $(VENV)/.ready ## create .venv with everything a CPU can use

# Made again when pyproject.toml changes; `.ready` is written last, so a broken install is never taken for a whole one.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("fishjax needs Python 3.11 or newer, this is %d.%d: try make PYTHON=python3.12 ..." % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about two minutes the first time)"
	@$(BIN)/python -m pip install --progress-bar on -q -e ".[dev]"
	@touch $@

demo: $(VENV)/.ready ## speak TEXT with the small voice through a real gRPC server; writes hello.wav
	@$(BIN)/python examples/demo.py --text "$$TEXT" --output hello.wav

serve: $(VENV)/.ready ## start the gRPC server with the small voice on 127.0.0.1:50051
	@$(BIN)/python -m serving

test: $(VENV)/.ready ## lint, types, import rules and all tests that a CPU can run
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/pyright
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

bench: $(VENV)/.ready ## measure kernels, step and server; without a GPU: small cases, and the server with the small voice
	@command -v nvidia-smi > /dev/null || echo "no GPU: times of kernels and step are of small cases on the CPU and say nothing of a GPU; those of the server are this machine's own"
	@$(BIN)/python -m fishjax.bench kernels
	@$(BIN)/python -m fishjax.bench step
	@$(BIN)/python -m fishjax.bench serve --batch-lane

clean: ## remove .venv and what tests left behind
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis hello.wav

.PHONY: help env demo serve test bench clean
