# Each target sets up all it needs in .venv: `make demo` and `make test` work right after a clone.
# Needs Python 3.10 or newer (choose one with `make test PYTHON=python3.12`), git and make.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
DATA := data/digits
RUN := output/demo/digits

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# A set-up that fails half way leaves no stamp behind.
.DELETE_ON_ERROR:
.PHONY: help demo detection segmentation test test-all test-timm install format lint type check table bench compare
.PHONY: compare-accuracy clean
# Kept, though only a pattern names them.
.PRECIOUS: $(VENV)/.installed-%

PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check
ifeq ($(CI),true)
PIP_INSTALL += --quiet --progress-bar off
endif
# One torch thread for each test worker: more only get into each other's way.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python must be 3.10 or newer, got {v[0]}.{v[1]}; choose one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo 'Python must have venv and ensurepip (on Debian and Ubuntu: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp of an extra: installed again when the metadata changes.
$(VENV)/.installed-%: setup.cfg pyproject.toml $(VENV)/pyvenv.cfg
	$(PIP_INSTALL) -e ".[$*]"
	@touch $@

demo: $(VENV)/.installed-demo ## train SOFT on handwritten digits and test it (8 minutes on 2 cores); replaces output/demo/digits
	$(PY) examples/digits.py --output $(DATA)
	rm -rf $(RUN)
	$(PY) train.py --config configs/digits.yaml --data-dir $(DATA) --output $(dir $(RUN)) --experiment $(notdir $(RUN))
	$(PY) validate.py --data-dir $(DATA) --split test --workers 2 --checkpoint $(RUN)/model_best.pth.tar --results-file $(RUN)/test.json
	@$(PY) -c 'import json, sys; print("Accuracy: {top1:.2f} % top-1 on {samples:,} test images".format(**json.load(open(sys.argv[1]))))' $(RUN)/test.json
	@echo "Checkpoint: $(RUN)/model_best.pth.tar"
	@echo "TensorBoard log: $(RUN), shown by: $(PY) -m tensorboard.main --logdir $(RUN)"

detection: $(VENV)/.installed-downstream $(RUN)/model_best.pth.tar ## train Mask R-CNN on scenes of digits, from the demo's classifier (5 minutes)
segmentation: $(VENV)/.installed-downstream $(RUN)/model_best.pth.tar ## the same with UPerNet (13 minutes)
detection segmentation:
	$(PY) -m examples.$@ --data $(DATA) --output output/$@ --checkpoint $(RUN)/model_best.pth.tar

$(RUN)/model_best.pth.tar:
	$(MAKE) demo

test: $(VENV)/.installed-test ## the fast test-suite (below 10 minutes on 2 cores)
	$(PYTEST) tests

test-all: $(VENV)/.installed-test ## every test of ours, the slow ones too
	$(PYTEST) --slow tests

test-timm: $(VENV)/.installed-test ## the test-suite of the installed timm, on every model of ours
	OMP_NUM_THREADS=1 $(PY) tests/timm_suite.py -n $(WORKERS)
	$(PYTEST) --slow tests/test_timm_suite.py

install: $(VENV)/.installed-dev ## everything for development, with the pre-commit hooks
	if git rev-parse --git-dir >/dev/null 2>&1; then $(VENV)/bin/pre-commit install; fi

format: $(VENV)/.installed-dev ## rewrite the code in house style
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: $(VENV)/.installed-dev ## the same as checks only
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

type: $(VENV)/.installed-dev ## mypy
	$(PY) -m mypy

check: lint type test ## what to run before a commit

table: $(VENV)/.installed-test ## rewrite docs/models.md from the registry
	$(PY) -m soft_models --update docs/models.md

compare: $(VENV)/.installed-plots ## every attention in one body: speed and memory (5 minutes; run nothing else)
	$(PY) -m benchmarks.attention

compare-accuracy: $(VENV)/.installed-plots $(VENV)/.installed-demo ## the same on the digits, three seeds each (75 minutes)
	$(PY) -m benchmarks.attention --accuracy

bench: $(VENV)/.installed-test ## speed and memory against timm's models (15 minutes; run nothing else)
	$(PY) -m benchmarks.speed

clean: ## remove caches and build leftovers; data, runs and the environment stay
	rm -rf build dist *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
