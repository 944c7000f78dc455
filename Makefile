# make help lists the targets.
# The first Python that is new enough; another is chosen by `make PYTHON=/path/to/python TARGET`.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEMO_VENV := .demo-venv
DEMO_BIN := $(DEMO_VENV)/bin
TORCH_VENV := .torch-venv
PIP_INSTALL := pip install --disable-pip-version-check --no-input --constraint constraints.txt
# Without this ONNX Runtime reports its use to its maker.
export ORT_DISABLE_TELEMETRY := 1
# Without bytecode each process of a test compiles what it imports: 17 s of processor time for the exporter in place of 6.
export PYTHONDONTWRITEBYTECODE :=

define CHECK_PYTHON
@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; $(PYTHON) is " \
	+ sys.version.split()[0] + ": make PYTHON=/path/to/python3.12 ...")'
endef

.PHONY: help install dist version lint proto proto-baseline client test test-benchmarks test-newest-torch test-ray test-clients serve screenshots bench bench-shipped bench-compare bench-generation bench-classification bench-translation demo container-test sbom clean

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed ## Make .venv with everything

$(VENV)/.installed: constraints.txt requirements-dev.txt $(wildcard */pyproject.toml)
	$(CHECK_PYTHON)
	@echo "Making $(VENV) with everything a developer needs; torch makes this take minutes the first time."
	$(PYTHON) -m venv $(VENV)
# One build environment for the five distributions, and bytecode of what is imported alone.
	$(BIN)/$(PIP_INSTALL) hatchling editables
	$(BIN)/$(PIP_INSTALL) --no-build-isolation --no-compile --requirement requirements-dev.txt
	@touch $@

lint: install ## Style, types, which module may import which, the generated client, and declared dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python client/generate.py --check
	for folder in proto server client training export; do (cd $$folder && ../$(BIN)/deptry .) || exit 1; done

proto: install ## Generate the stubs from the .proto files
	PATH="$(abspath $(BIN)):$$PATH" bash proto/generate.sh

proto-baseline: install ## Take the protocol as it is for the baseline that later ones are compared with (buf, by npm)
	cd proto && npx --yes @bufbuild/buf@1.75.0 build --exclude-source-info -o baseline.binpb.gz

client: install ## Generate the blocking client from the asyncio one
	$(BIN)/python client/generate.py

test: install lint ## Everything: lint and the whole suite
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5

test-benchmarks: install ## Every program of benchmarks/ on tiny models; `make test` has that of the shipped models alone
	$(BIN)/pytest tests/benchmarks -m "comparison or not comparison"

test-newest-torch: $(TORCH_VENV)/.installed ## Training and exporter with the newest torch that they allow, in an environment of their own
	$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(TORCH_VENV)/bin/pytest tests/training tests/export --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Everything is pinned but torch, of which the distributions say what they take. Its build for CUDA needs 5 GB.
$(TORCH_VENV)/.installed: constraints.txt requirements-dev.txt $(wildcard */pyproject.toml)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/$(PIP_INSTALL:constraints.txt=$(TORCH_VENV)/constraints.txt) hatchling editables
	$(TORCH_VENV)/bin/$(PIP_INSTALL:constraints.txt=$(TORCH_VENV)/constraints.txt) --no-build-isolation --no-compile \
		--requirement requirements-dev.txt
	@touch $@

test-ray: install ## Install Ray (240 MB) and test a store on Ray Serve, in a Ray of two nodes; without it these tests are skipped
	$(BIN)/$(PIP_INSTALL) 'ray[serve]'
	$(BIN)/pytest tests/ray
	TESTED_SERVER=tests/support/ray_server.py $(BIN)/pytest tests/integration/test_every_rpc.py

test-clients: install ## Other people's clients, each in an environment of its own, against a server; needs npm, and 6 to 11 GB
	$(BIN)/$(PIP_INSTALL) uv
	$(BIN)/python -m tests.clients $(ARGS)

serve: $(DEMO_VENV)/.installed ## The shipped models on 127.0.0.1:50051, and a page to try them at http://127.0.0.1:8080/ (no torch); ARGS="--port 50052 ..."
	$(DEMO_BIN)/headway-server --store models --host 127.0.0.1 --port 50051 --http-port 8080 $(ARGS)

screenshots: install ## The pictures of the page in docs/images; needs a Chromium
	$(BIN)/python docs/screenshots.py

bench: ## Every benchmark below, on this machine; their ARGS differ, so give them to one of them
	$(MAKE) bench-shipped ARGS=
	$(MAKE) bench-generation ARGS=
	$(MAKE) bench-translation ARGS=
	$(MAKE) bench-classification ARGS=

bench-shipped: install ## Measure the shipped models as they are served
	$(BIN)/python -m benchmarks shipped $(ARGS)

bench-compare: install ## Measure the shipped models here and at another commit, in turn: make bench-compare BASE=COMMIT
	@test -n "$(BASE)" || { echo "Name the commit to compare with: make bench-compare BASE=COMMIT" >&2; exit 1; }
	$(BIN)/python -m benchmarks shipped --base $(BASE) $(ARGS)

bench-generation: install ## Measure a GPT-2 small beside other libraries
	$(BIN)/python -m benchmarks generation $(ARGS)

bench-translation: install ## Measure a Transformer base, greedy and with beams, beside other libraries
	$(BIN)/python -m benchmarks translation $(ARGS)

bench-classification: install ## Measure BERT-base and ViT-B/16 beside other servers and a gRPC echo
	$(BIN)/python -m benchmarks classification $(ARGS)

demo: $(DEMO_VENV)/.installed ## A real server, and checked answers of every call (no torch); IMAGES="FILE ..." AUDIO="FILE ..." add your files
	$(DEMO_BIN)/python demo/run.py $(IMAGES) $(addprefix --audio ,$(AUDIO))

# What serving needs, and no more: the same three distributions as the images, from this tree.
$(DEMO_VENV)/.installed: Makefile constraints.txt proto/pyproject.toml server/pyproject.toml client/pyproject.toml
	$(CHECK_PYTHON)
	@echo "Making $(DEMO_VENV) with what serving needs; this takes about half a minute the first time."
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_BIN)/$(PIP_INSTALL) --quiet --editable ./proto --editable "./server[cpu,http,speech]" --editable "./client[cli]"
	@touch $@

container-test: $(DEMO_VENV)/.installed ## Build the images and put their containers to the test; needs a Docker engine
	$(DEMO_BIN)/python tests/container/run.py

dist: ## Build the wheels and source archives of the five distributions into dist/, and check them
	$(CHECK_PYTHON)
	rm -rf build/dist dist
	$(PYTHON) -m venv build/dist
	build/dist/bin/$(PIP_INSTALL) --quiet build check-wheel-contents hatchling twine
	for folder in proto server client training export; do \
		build/dist/bin/python -m build --quiet --no-isolation --outdir dist $$folder || exit 1; done
	build/dist/bin/twine check --strict dist/*
	build/dist/bin/check-wheel-contents --ignore W009 dist/*.whl  # two distributions hold two packages each

version: ## Give all distributions a version: make version VERSION=1.0.0
	@test -n "$(VERSION)" || { echo "Name the version: make version VERSION=1.0.0" >&2; exit 1; }
	sed -i -E 's/^version = ".*"$$/version = "$(VERSION)"/; s/("headway-[a-z]+(\[[a-z,]+\])?==)[^"]+/\1$(VERSION)/' */pyproject.toml

sbom: ## What is in the images' Python environments, with licences and known vulnerabilities, in build/sbom
	$(CHECK_PYTHON)
	$(PYTHON) docker/sbom.py $(ARGS)

clean: ## Remove the environments and everything that tools leave behind
	rm -rf $(VENV) $(DEMO_VENV) $(TORCH_VENV) .clients build dist
	find . \( -name __pycache__ -o -name '.*_cache' -o -name .hypothesis \) -type d -prune -exec rm -rf {} +
