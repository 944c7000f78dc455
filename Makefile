# make help lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install lint proto test serve bench demo clean

help: ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(VENV)/.installed ## Make .venv with everything

$(VENV)/.installed: constraints.txt pyproject.toml $(wildcard */pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
	touch $@

lint: install ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: install ## Generate the stubs from the .proto files
	PATH="$(abspath $(BIN)):$$PATH" bash proto/generate.sh

test: install lint ## Everything: style, types and the whole suite
	$(BIN)/pytest

serve: install ## A server on 127.0.0.1:50051 with the shipped models
	$(BIN)/headway-server --store models --host 127.0.0.1 --port 50051
