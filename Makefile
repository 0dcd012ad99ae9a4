# Everything a developer or a continuous-integration job runs. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
SOAPSTONE := $(VENV)/bin/soapstone
WORKERS ?= 2
# Wide layers and few samples: where data parallelism moves far more than it has to.
DEMO := mlp:features=1024,hidden=1024,layers=4 --batch 32

# The environment is up to date while this file is newer than all that went into it.
READY := $(VENV)/ready
# Build requirements sit in the environment, pinned, because an isolated build would fetch others.
BUILD_TOOLS := pip scikit-build-core nanobind ninja cmake

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench wheel browser clean

help: ## Show this help.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Make .venv with the pinned dependencies and the native core in it.

$(PY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Soapstone needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*.h cpp/*.cc) | $(PY)
	$(PIP) install --upgrade --constraint constraints.txt $(BUILD_TOOLS)
	$(PIP) install --no-build-isolation --constraint constraints.txt --editable ".[dev,hf]"
	@touch $@

demo: $(READY) ## Measure this computer, plan a model for two workers of it, train it that way and as others do; see out/.
	@mkdir -p out
	$(SOAPSTONE) machine detect --ranks 2 -o out/here.yaml
	$(SOAPSTONE) profile $(DEMO) --machine out/here.yaml --budget 20s
	$(SOAPSTONE) plan $(DEMO) --machine out/here.yaml --costs measured --budget 5s -o out/plan.json
	$(SOAPSTONE) simulate out/plan.json --trace out/predicted.json --tasks out/tasks.json
	$(SOAPSTONE) train out/plan.json --steps 20 --checkpoint out/checkpoint --trace out/actual.json
	$(SOAPSTONE) simulate --model $(DEMO) --machine out/here.yaml --costs measured --strategy data_parallel -o out/data_parallel.json
	$(SOAPSTONE) train out/data_parallel.json --steps 20
	$(SOAPSTONE) report out/plan.json --actual out/actual.json -o out/report.html

test: $(READY) ## Run all tests.
	$(PY) -m pytest -n $(WORKERS)

check: $(READY) ## Check format, lint, types and the direction of imports.
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(READY) ## Format the code and fix what can be fixed without a person.
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

bench: $(READY) ## Run the benchmarks in bench/.
	@for script in $(sort $(wildcard bench/*.py)); do echo "== $$script"; $(PY) $$script || exit 1; done

# Nothing but pip and the wheel is in the environment, and the commands run in another directory.
wheel: $(READY) ## Build the wheel, install it into an empty environment, and run the README's commands there.
	rm -rf build/installed && mkdir -p build/installed
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/installed .
	$(PYTHON) -m venv build/installed/venv
	build/installed/venv/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt build/installed/*.whl
	$(PY) tests/installed.py build/installed/venv/bin README.md

# Debian's packages, unpacked here: no root. What the packages need and this computer lacks comes with them.
BROWSER := chromium-headless-shell
browser: ## Fetch a headless Chromium into .browser, for the tests of the report page (Debian).
	rm -rf .browser && mkdir -p .browser/packages
	cd .browser/packages && apt-get download $(BROWSER) chromium-common \
	  $$(apt-get --simulate install --no-install-recommends $(BROWSER) | awk '/^Inst/ && !/$(BROWSER)|chromium-common/ { print $$2 }')
	for package in .browser/packages/*.deb; do dpkg-deb -x $$package .browser; done
	rm -r .browser/packages

clean: ## Remove everything that make made.
	rm -rf $(VENV) .browser build dist out src/soapstone/_core.*.so .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
