# Every target creates .venv by itself. Overridable: PYTHON (the interpreter of a new .venv), PIP_ARGS, ARGS (for pytest or the bench), CORE
# (n1 or n2, for aarch64), TORCH (its version, 2.12.1 for example, where that of constraints.txt is not meant; changes the .venv that is there).
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
CORE ?= n2
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

ROOT := $(CURDIR)
BIN := .venv/bin
PINS := .venv/constraints.txt
STAMP := .venv/.installed-$(TORCH)
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
FAST := $(wildcard tests/diagnostics tests/platforms tests/graph tests/rewrite tests/stitch)

# Keeps the checkout itself off sys.path (as python -P does), where libraries would take its `kernels` for a package of that name.
export PYTHONSAFEPATH := 1

.PHONY: demo test sweep gpu check lint types layout bench accuracy slow opinfo architectures aarch64 avx512 clean

demo: $(STAMP)
	$(BIN)/python benchmarks/demo.py $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile -m "not slow and not sweep" $(ARGS)

# The same checks for more types, machines and models.
sweep: $(STAMP)
	$(BIN)/pytest -n auto --dist load -m "sweep and not slow" $(ARGS)

slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

# Every operator of PyTorch's own database against eager: a table of what is right, wrong, and left to PyTorch.
opinfo: $(STAMP)
	$(BIN)/pytest -q -s -m slow tests/driver/test_opinfo.py $(ARGS)

# Every architecture of transformers, tiny, against eager and quantized: the same kind of table.
architectures: $(STAMP)
	$(BIN)/pytest -q -s -m slow tests/models/test_architectures.py $(ARGS)

# Any tests on an emulated Neoverse, 20 to 50 times slower than a real one: make aarch64 CORE=n1 ARGS=tests/quant; docs/add_a_kernel.md.
aarch64: .venv/aarch64/.made
	tests/aarch64/run.sh .venv/aarch64 $(CORE) -m pytest -m "not slow and not sweep" $(ARGS)

# What kernels for AVX-512 compute, on a machine without it: Bochs takes a quarter of a second or more for a call. make avx512 ARGS=tests/kernels/test_gemm.py
avx512: $(STAMP)
	TEST_ON_BOCHS=1 $(BIN)/pytest -n auto --dist load -m "bochs and not slow and not sweep" $(ARGS)

check: lint types
	$(BIN)/pytest -q -n auto --dist load -m "not slow and not sweep" tests/test_layout.py $(FAST)

# On a machine with an NVIDIA GPU, in an environment of your own that has PyTorch's build for it: make gpu BIN=path/to/bin.
gpu:
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

# The checkout is the package, whatever its folder is called, so the type checker sees it through a link with the right name.
types: $(STAMP)
	@link=$$(mktemp -d) && ln -s "$(ROOT)" "$$link/sashiko" && cd "$$link" && \
	  "$(ROOT)/$(BIN)/mypy" --config-file "$(ROOT)/pyproject.toml" --cache-dir "$(ROOT)/.mypy_cache" \
	    $(addprefix sashiko/,__init__.py __main__.py $(PACKAGES)); \
	  status=$$?; rm -r "$$link"; exit $$status

layout: $(STAMP)
	$(BIN)/pytest -q tests/test_layout.py

bench: .venv/.bench
	$(BIN)/sashiko bench $(ARGS)

# What quantization costs in accuracy, here and with the peers; docs/accuracy.md.
accuracy: .venv/.bench
	PYTHONPATH=benchmarks $(BIN)/python -m accuracy $(ARGS)

# What is pinned in the environment is what the emulated one gets, so it is made again when that changes.
.venv/aarch64/.made: $(STAMP) tests/aarch64/prepare.sh
	PIP_ARGS="$(PIP_ARGS)" tests/aarch64/prepare.sh .venv/aarch64 $(BIN)/python
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12" or 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@rm -f .venv/.installed*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(PINS)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c $(PINS) torch==$(TORCH)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c $(PINS) -e ".[dev,demo]"
	@touch $@

.venv/.bench: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c $(PINS) -e ".[dev,demo,bench]"
	@touch $@
