# `make` alone lists what there is to do. Every target that needs the environment sets it up first; when it is
# already as it should be, that takes no time.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

python := .venv/bin/python

# Two workers: each test that starts a real vLLM engine takes about 2 GiB, and those run one after the other anyway.
WORKERS ?= 2
pytest = $(python) -m pytest -n $(WORKERS) --dist loadgroup
# Tests start hundreds of Python processes. Under PYTHONDONTWRITEBYTECODE each would compile kvledger anew.
compile = $(python) -m compileall -q adapters lifecycle storage tests docs
SEEDS ?= 200
REQUESTS ?= 20000
KILLS ?= 5000
CASES ?= 2400

.PHONY: help demo setup test test-long check format sim mutants soak stress torture fuzz lmcache vllm-next gpu-check bench bench-full docs docs-site lock clean distclean

help: ## list the targets
	@echo "kvledger: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## watch a preempted request recover, and read its log
	$(python) -m kvledger.adapters.lab.demo

setup: ## create .venv from the lock and install kvledger in it
	@requirements/install.sh

test: setup ## run the tests that a change needs, half an hour on two cores (ARGS="-k name" passes options to pytest)
	@requirements/browser.sh
	@requirements/debian.sh nats-server "log shipping"
	@requirements/debian.sh prometheus "metrics and alerts"
	@$(compile)
	$(pytest) -m "not long" $(ARGS)

test-long: setup ## run all other tests: more worlds, more configurations of real engines
	@$(compile)
	$(pytest) -m long $(ARGS)

lmcache: setup ## install LMCache in .venv-lmcache, and record it in real vLLM
	@requirements/overlay.sh lmcache
	.venv-lmcache/bin/python -m pytest tests/e2e/test_lmcache.py $(ARGS)

vllm-next: python := .venv-vllm-0.33/bin/python
vllm-next: setup ## run the tests of the adapter, the recorder, worlds and mutants on vLLM 0.33 (no real models: it has no CPU build)
	@requirements/overlay.sh vllm-0.33
	$(pytest) -m "not long" $(addprefix tests/,adapters/vllm adapters/recorder adapters/lab/conformance adapters/lab/repro sim mutants e2e) $(ARGS)

check: setup ## lint, formatting, types, import contracts
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy -p kvledger
	PYTHONPATH=.venv/import-root .venv/bin/lint-imports --no-logo

format: setup ## apply the formatter and the fixes that are safe
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

sim: setup ## simulate: SEEDS=1000 worlds, or SEED=17 alone with its transcript; ARGS=--compare: other connectors, too
	$(python) tests/sim/run.py $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

mutants: setup ## switch historical mistakes on: SEEDS=200 of each, RULE=NAME, SEED=17 with its transcript; ARGS=--healthy: none
	$(python) tests/mutants/run.py $(if $(RULE),--rule $(RULE)) $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

soak: setup ## serve REQUESTS=20000 short requests through one engine, and look at what is left
	$(python) tests/sim/soak.py --requests $(REQUESTS)

stress: setup ## serve SEEDS=100 crowds of requests with real engines and tiny pools
	$(python) tests/e2e/stress.py --seeds $(SEEDS)

torture: setup ## kill KILLS=5000 writers of logs at random (SEED=17 repeats a run), and read what they left
	$(python) tests/log_torture/run.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))

fuzz: setup ## change logs in CASES=2400 ways (SEED=17 repeats a run), and read them with every command
	$(python) tests/log_fuzz/run.py --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(ARGS)

gpu-check: ## look at what needs a CUDA GPU, with any Python that has torch for CUDA and pytest (PYTHON=python3)
	$(or $(PYTHON),python3) tests/gpu_check/run.py $(ARGS)

bench: setup ## measure kvledger beside its peers, some minutes (ARGS=scheduler: one benchmark; TRACE=FILE: a trace)
	$(python) tests/benchmarks/run.py $(if $(TRACE),trace --trace '$(TRACE)') $(ARGS)

bench-full: setup ## all cases of it, and write their figures into docs/benchmarks.md
	$(python) tests/benchmarks/run.py --full $(ARGS)
	$(python) tests/benchmarks/run.py --page

docs: setup ## write the generated pages of docs/ again
	$(python) docs/generate.py

docs-site: docs ## build the docs site into site/, and refuse a page that warns or a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --quiet --strict
	@echo "site/index.html is the first page; with a search: python3 -m http.server -d site"

lock: ## compile requirements/lock.txt and the smaller locks again, with hashes (UPGRADE=1: to the newest versions)
	@requirements/compile.sh

clean: ## remove what builds and tools left behind
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -path ./.git -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf

distclean: clean ## clean, and remove .venv and those on top of it
	rm -rf .venv .venv-*
