# Everything is installed into the checkout: .venv/ for Python, .local/ for what the machine lacks.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ENGINE ?= sim
export PATH := $(CURDIR)/.local/bin:$(PATH)

.PHONY: help setup setup-engine run test test-light test-engine lint format protos contract lock bench clean

help:  ## Shows this list
	@grep -hE '^[a-zA-Z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-zA-Z_-]+):.*## /  \1|/' | column -t -s '|'

setup:  ## Installs the light services, their tests and the native parts into .venv
	@deploy/setup/install.sh light

setup-engine: setup  ## Adds torch and the kernels' compilers (about 3 GB to load)
	@deploy/setup/install.sh engine

run: setup  ## Starts the local stack and prints how to talk to it (ENGINE=sim needs no torch)
	@exec $(BIN)/pelagos up --engine $(ENGINE) $(ARGS)

test: setup  ## Runs the whole suite
	@deploy/setup/test.sh

lint: setup  ## Checks layout, types, imports, contracts and both crates
	@deploy/setup/lint.sh

format: setup  ## Lays out Python, Rust and protos
	@$(BIN)/ruff check --fix-only -q . ; $(BIN)/ruff format -q . ; cargo fmt --all ; $(BIN)/buf format -w

protos: setup  ## Lints the contracts and regenerates protos/gen
	@$(BIN)/buf format -w && $(BIN)/buf lint && deploy/setup/protos.sh

contract: setup  ## Accepts today's contracts as what later ones may not break
	@$(BIN)/buf build -o protos/contract.binpb

lock: setup  ## Resolves the dependencies again
	@$(BIN)/uv pip compile -q -U --generate-hashes --no-header --extra dev pyproject.toml -o deploy/locks/core.lock
	@$(BIN)/uv pip compile -q -U --generate-hashes --no-header --extra engine -c deploy/locks/core.lock pyproject.toml -o deploy/locks/engine.lock

bench: bench-recipe bench-lb bench-path  ## Runs the benchmarks

bench-recipe: setup  ## Codec beside the packages that do the same
	@$(BIN)/python -m services.recipe.benchmarks.bench_recipe $(ARGS)

bench-lb: setup  ## What a decision of the balancers costs, against its budget
	@$(BIN)/python -m tests.bench.bench_lb $(ARGS)

bench-path: setup  ## Latency of each hop, TTFT and throughput through the whole path, beside a peer router
	@$(BIN)/python -m tests.bench.bench_path $(ARGS)

bench-model: setup-engine  ## The network beside V4 in transformers, at equal sizes
	@$(BIN)/python -m services.engine.model.benchmarks.bench_model --write docs/performance/model.md $(ARGS)

clean:  ## Removes what was built and installed
	@rm -rf .venv .local build target *.egg-info
