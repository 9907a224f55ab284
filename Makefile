# make demo   the main job on real input: workers and sandboxes are killed, trajectories go on (a few minutes)
# make test   linters, types, and every test, with real engines, a real Docker Engine and CRIU
#
# Both begin with `make setup`, which brings what a bare Debian 12 or 13 machine lacks and does nothing the next time.
.DEFAULT_GOAL := help
.PHONY: help setup doctor demo test lint bench stop clean

PYTHON := .venv/bin/python
SOURCES := belayer gpuowner belayerd envkeeper belayerctl tests benchmarks examples setup
# Set to narrow a run: make test TESTS=tests/unit
TESTS ?= tests

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: ## install what is missing: packages, CRIU, Docker Engine, base image, .venv, model
	@setup/all.sh

doctor: ## check this machine: versions, a real dump and restore, the model's digests
	@setup/doctor.sh

demo: setup ## run the demo; exit status 0 only if nothing was lost
	@$(PYTHON) -m examples.demo

test: setup ## ruff, mypy, pytest (TESTS=path narrows it)
	@setup/test.sh $(TESTS)

lint: ## ruff and mypy only
	@$(PYTHON) -m ruff check $(SOURCES)
	@$(PYTHON) -m ruff format --check $(SOURCES)
	@$(PYTHON) -m mypy

bench: setup ## handover, checkpoint and owner benchmarks; JSON under .cache/bench
	@mkdir -p .cache/bench
	$(PYTHON) -m benchmarks.handover --only tiny,smollm2 --kinds kill,stop --contexts 400 --json .cache/bench/handover.json
	$(PYTHON) -m benchmarks.checkpoint --json .cache/bench/checkpoint.json
	$(PYTHON) -m benchmarks.actions --json .cache/bench/actions.json
	$(PYTHON) -m benchmarks.owner --json .cache/bench/owner.json

stop: ## stop the Docker Engine that setup started, and sandboxes that a killed run left
	@setup/stop.sh

clean: ## remove .venv and .cache (the next setup downloads again)
	rm -rf .venv .cache build *.egg-info
