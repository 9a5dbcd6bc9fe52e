PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint types unit links bench build clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP) ## Stable-Baselines3 PPO on CartPole-v1, stock and patched, side by side
	$(BIN)/python examples/sb3_ppo.py

test: lint types unit ## everything that continuous integration runs

lint: $(STAMP) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) links ## mypy over both import packages
	MYPYPATH=build/links $(BIN)/mypy -p rl_triton

unit: $(STAMP) ## the tests: CPU backend, and the kernels in Triton's interpreter
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

links: ## symlink tree for static tools and for runs without an install
	rm -rf build/links && mkdir -p build/links/rl_triton
	ln -s $(CURDIR)/core_kernels/* build/links/rl_triton/ && ln -s $(CURDIR)/adapters build/links/rl_triton/adapters

bench: $(STAMP) ## speed beside the baselines, on a GPU if there is one; then plots, README table and docs/speed.md
	$(BIN)/python -m benchmarks.run --tier headline
	$(BIN)/python -m benchmarks.report

build: $(STAMP) ## sdist and wheel in dist/
	$(BIN)/python -m build

clean: ## everything generated but .venv
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
