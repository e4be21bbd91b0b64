# `make serve` and `make test` set up .venv by themselves; the set-up is redone only when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP := $(BIN)/pip --disable-pip-version-check install -q

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test test-quick check audit bench peers gpu docs loadtest image image-check format clean

help:  ## List the commands.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / \t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in {(3, 11), (3, 12)} or sys.exit(f"error: Python 3.11 or 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}; name another one with: make PYTHON=python3.11")'
	@if $(PYTHON) -c 'import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; \
	then $(PYTHON) -m venv $(VENV); \
	elif command -v dpkg >/dev/null; then sh requirements/debian.sh $(PYTHON) $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi || { rm -rf $(VENV); exit 1; }

$(VENV)/runtime.stamp: requirements/runtime.txt requirements/constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (runtime): downloads some hundred MB, or several GB where torch comes with CUDA (README.md tells how to have the small one), and takes a minute or more; done once, until the pins change." >&2
	@$(PIP) -r requirements/runtime.txt
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/runtime.stamp
	@echo "Setting up $(VENV) (tests, checks, load tests): some hundred MB more." >&2
	@$(PIP) -r requirements/dev.txt
	@touch $@

.judges/stamp: requirements/judges.txt | $(BIN)/python
	@echo "Setting up .judges (other people's clients, for the tests)." >&2
	@$(BIN)/python -m venv .judges 2>/dev/null || { $(BIN)/python -m venv --without-pip .judges && $(BIN)/pip --disable-pip-version-check --python .judges/bin/python install -q pip; }
	@.judges/bin/pip --disable-pip-version-check install -q -r requirements/judges.txt
	@touch $@

# The peers see what .venv has, so that all of them run the same torch; what they need in another version goes before it.
.peers/stamp: requirements/peers.txt $(VENV)/runtime.stamp
	@echo "Setting up .peers (other servers, to compare with)." >&2
	@$(BIN)/python -m venv .peers 2>/dev/null || { $(BIN)/python -m venv --without-pip .peers && $(BIN)/pip --disable-pip-version-check --python .peers/bin/python install -q pip; }
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$(.peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth"
	@.peers/bin/pip --disable-pip-version-check install -q -r requirements/peers.txt
	@touch $@

setup: $(VENV)/runtime.stamp  ## Set up .venv with what the server needs.

setup-dev: $(VENV)/dev.stamp  ## Set up .venv with what the tests, the checks and the load tests need as well.

serve: $(VENV)/runtime.stamp  ## Start the server on 127.0.0.1:8000; flags: make serve ARGS="--port 9000".
	@exec $(BIN)/python -m service $(ARGS)

# Three files at a time, also on two cores: tests of whole servers wait as long as they compute.
test: $(VENV)/dev.stamp .judges/stamp  ## Run the whole suite, three files at a time; flags: make test ARGS="-k wire".
	@exec $(BIN)/python -m pytest --numprocesses 3 --dist loadfile $(ARGS)

test-quick: $(VENV)/dev.stamp  ## Run what takes about a minute.
	@exec $(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile $(ARGS)

check: $(VENV)/dev.stamp  ## Lint, format, types, and the one-way rule.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m docs.render --check

# Vulnerabilities that do not reach us; CONTRIBUTING.md argues each, and a test holds that it does.
ARGUED = CVE-2026-136426 CVE-2026-136427

audit: $(VENV)/dev.stamp  ## Look every pin up among the known vulnerabilities, which needs the network; another source: make audit ARGS="-s osv".
	@$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off $(addprefix --ignore-vuln ,$(ARGUED)) $(addprefix -r ,$(wildcard requirements/*.txt)) $(ARGS)

OVERLOAD = $(BIN)/python -m loadtests scenario overload geglu-768 --backends fused --rows 16 --wire binary --objective-ms 1000 --max-refusal-ms 5 --out out/overload

bench: $(VENV)/dev.stamp  ## Measure anew what stands under docs/results, and renew the README's figures.
	@$(BIN)/python -m loadtests overhead --json docs/results/overhead.json
	@if command -v wrk >/dev/null; then $(BIN)/python -m loadtests saturation --json docs/results/saturation.json; else echo "Without wrk (apt-get install wrk) docs/results/saturation.json stays as it is." >&2; fi
	@$(BIN)/python -m service.profile --json docs/results/request-path.json
	@for dtype in float32 bfloat16; do $(BIN)/python -m models bench geglu-768 --rows 1,4,16,64,256,1024 --repetitions 15 --dtype $$dtype --json docs/results/bench-cpu-$$dtype.json || exit; done
	@$(BIN)/python -m models batch-invariance geglu-768 --json docs/results/batch-invariance.json
	@$(BIN)/python -m examples.fuse_minilm --threads 1 --repetitions 15 --json docs/results/fuse-minilm.json
	@$(BIN)/python -m loadtests compare geglu-768 --rows 16 --wire binary --objective-ms 100 --users 1,8 --seconds 2 --warm-up-s 0.5 --out out/compare -- --threads 1
	@cp out/compare/compare.json docs/results/compare.json
	@rm -rf out/overload
	@$(OVERLOAD) --server-cpus 0 || [ $$? -eq 1 ]  # an objective that is missed is a result as well
	@cp out/overload/scenario.json docs/results/overload.json
	@rm -rf out/overload
	@$(OVERLOAD) || [ $$? -eq 1 ]  # an objective that is missed is a result as well
	@cp out/overload/scenario.json docs/results/overload-all-cores.json
	@PYTHONPATH=. $(BIN)/python tests/service/chaos/soak.py --seconds 600 --json docs/results/soak.json
	@$(BIN)/python -m docs.render

peers: $(VENV)/dev.stamp .peers/stamp  ## Compare with other servers, 40 minutes, and renew docs/peers.md; needs wrk.
	@$(BIN)/python -m loadtests peers --json docs/results/peers.json $(ARGS); status=$$?; $(BIN)/python -m docs.render && exit $$status

gpu:  ## Check and measure everything on a GPU, in under 8 minutes; needs torch, triton, numpy and safetensors alone.
	@$(PYTHON) -m models.gpu $(ARGS)

docs: $(VENV)/dev.stamp  ## Renew the generated parts of README.md and of docs/.
	@$(BIN)/python -m docs.render

loadtest: $(VENV)/dev.stamp  ## Load a running server with locust; flags: make loadtest ARGS="--headless -u 8 -t 10s --tags fused".
	@exec $(BIN)/locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 $(ARGS)

image:  ## Build the Docker image; flags: make image ARGS="--build-arg TORCH_BUILD=cuda".
	@docker build -t fused-mlp-server $(ARGS) .

image-check: $(VENV)/dev.stamp  ## Build the image and run it as the pages say; needs Docker. Another base: BASE_IMAGE=NAME, an index: CPU_INDEX=URL.
	@IMAGE_CHECK=yes $(BIN)/python -m pytest tests/test_image.py $(ARGS)

format: $(VENV)/dev.stamp  ## Sort imports, fix what can be fixed, format.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## Remove .venv and the tools' caches.
	@rm -rf $(VENV) .judges .peers .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
