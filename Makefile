# Everything is installed into the checkout: .venv/ for Python, .local/ for what the machine lacks.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
# The network, once its weights are there; `make run ENGINE=sim` needs no torch.
ENGINE ?= $(if $(wildcard deploy/models/pelagos-mini/*.safetensors),torch,sim)
export PATH := $(CURDIR)/.local/bin:$(PATH)

.PHONY: help setup setup-engine run test test-light test-engine lint format protos contract lock bench campaign-kv campaign-cluster campaign-fuzz clean

help:  ## Shows this list
	@grep -hE '^[a-zA-Z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-zA-Z_-]+):.*## /  \1|/' | column -t -s '|'

setup:  ## Installs the light services, their tests and the native parts into .venv
	@deploy/setup/install.sh light

setup-engine: setup  ## Adds torch and the kernels' compilers (about 3 GB to load)
	@deploy/setup/install.sh engine

run: $(if $(filter sim,$(ENGINE)),setup,setup-engine)  ## Starts the local stack and prints how to talk to it (ENGINE=sim needs no torch)
	@exec $(BIN)/pelagos up --engine $(ENGINE) $(ARGS)

test: setup  ## Runs the whole suite
	@deploy/setup/test.sh

lint: setup  ## Checks layout, types, imports, contracts and the crates
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

bench-kv: setup  ## The KV cache store beside Redis, SGLang's tree, LMCache and ISA-L (loads about 3 GB once)
	@$(BIN)/python -m services.kvstore.benchmarks.bench_kv $(ARGS)

bench-lb: setup  ## What a decision of the balancers costs, against its budget
	@$(BIN)/python -m tests.bench.bench_lb $(ARGS)

bench-path: setup  ## Latency of each hop, TTFT and throughput through the whole path, beside a peer router
	@$(BIN)/python -m tests.bench.bench_path $(ARGS)

bench-model: setup-engine  ## The network beside V4 in transformers, at equal sizes
	@$(BIN)/python -m services.engine.model.benchmarks.bench_model --write docs/performance/model.md $(ARGS)

bench-drafts: setup-engine  ## The small model with and without its drafts, by batch
	@$(BIN)/python -m tests.bench.bench_drafts --write docs/performance/drafts.md $(ARGS)

campaign-kv: setup  ## A thousand seeds of crashes of the KV store; rewrites docs/campaigns.md
	@nice -n 10 $(BIN)/python -m tests.campaign.kv --write $(ARGS)

train: setup-engine  ## Makes the small model: tokenizer, backbone, draft head, checkpoint, figures (75 minutes of a core)
	@$(BIN)/python -m services.engine.training.tokenizer
	@$(BIN)/python -m services.engine.training $(ARGS)

campaign-cluster: setup  ## Twelve storage nodes, two killed, one stalling; rewrites docs/campaigns.md
	@nice -n 10 $(BIN)/python -m tests.campaign.kv_cluster --write $(ARGS)

campaign-fuzz: setup  ## Mutates the codec's corpus, SECONDS_EACH=60 a target, from SEED=1; what breaks is left in build/fuzz
	@mkdir -p build/fuzz && PELAGOS_FUZZ_FOUND="$(CURDIR)/build/fuzz" PELAGOS_FUZZ_SECONDS=$(or $(SECONDS_EACH),60) \
	  PELAGOS_FUZZ_SEED=$(or $(SEED),1) nice -n 10 cargo test -q --locked --release -p pelagos-codec --test fuzz_replay \
	  -- --ignored --nocapture campaign

clean:  ## Removes what was built and installed
	@rm -rf .venv .local build target *.egg-info
