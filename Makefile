# make bench     what moving Llama-3.1-70B's KV cache costs on this machine
# make test      everything that is quick; make test-full adds what is slow
# make fuzz      a longer search: FUZZ_SECONDS=600 of each target
# make test-rdma   RDMA over a Soft-RoCE device in an emulated machine
# make install   the shared part: .venv with kvxfer in it
# make benchmarks   bench/suites: the parts by themselves, beside plain sockets and memcpy
# make cost-model   how well bench --fit predicts requests that it has not seen
# make peers     bench/peers: beside NIXL, Mooncake, UCX, iperf3 and memcpy, on the same pieces
# make ucx-speed   of that, kvxfer over UCX beside a bare loop of UCP's calls, ucx_perftest and NIXL
# Each does its own set-up and redoes nothing that is up to date.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE := CMakeLists.txt $(shell find csrc topology -type f)
PACKAGES := $(shell find kvxfer -name __init__.py)
CXX_SOURCES := $(shell find csrc bench -name '*.h' -o -name '*.cpp')
CMAKE := $(BIN)/cmake
JOBS := $(shell nproc 2>/dev/null || echo 2)
CTEST := $(BIN)/ctest --output-on-failure --no-tests=error --parallel $(JOBS) --test-dir
BENCH_ARGS ?=
PEERS_ARGS ?=

# Tests start thousands of processes: without cached bytecode each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench benchmarks peers ucx-speed cost-model test test-full install install-dev lint test-native test-python test-python-units test-python-processes test-python-commands sanitize test-slow fuzz clean

bench: install
	$(BIN)/python -m kvxfer.bench --model 70b --backend all $(BENCH_ARGS)

benchmarks: install-dev
	$(BIN)/pytest bench/suites --benchmark-only --benchmark-columns=min,median,iqr,rounds $(BENCH_ARGS)

peers: install
	$(BIN)/python bench/peers $(PEERS_ARGS)

ucx-speed: install
	$(BIN)/python bench/peers --only ucx $(PEERS_ARGS)

cost-model: install
	$(BIN)/python bench/cost_model.py

# Side by side: each waits for something much of its time.
test: install-dev
	$(MAKE) --jobs=2 --output-sync=target lint test-native test-python

test-full: sanitize test-slow

install: .venv/installed

install-dev: .venv/installed-dev

.venv/created:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	@touch $@

# Built in place (build/), so that a change compiles only what it touches; that needs the build's tools in the venv itself.
.venv/installed: .venv/created pyproject.toml constraints.txt $(NATIVE) $(PACKAGES)
	$(PIP) cmake ninja nanobind scikit-build-core libucx-cu12
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=bench/peers $(BIN)/mypy --explicit-package-bases bench/peers
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

test-native: install-dev
	$(CMAKE) -S . -B build/tests -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DKVXFER_PYTHON=OFF -DKVXFER_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -Wno-dev > build/tests.log 2>&1 || (cat build/tests.log; false)
	$(CMAKE) --build build/tests --parallel $(JOBS) >> build/tests.log 2>&1 || (cat build/tests.log; false)
	$(CTEST) build/tests

# Two parts at once: what starts other processes waits for them half of the time, what computes in one does not. The third
# part, which runs whole benchmarks, follows the shorter one.
test-python: install-dev
	$(MAKE) --jobs=2 --output-sync=target test-python-processes test-python-units test-python-commands

COMMANDS := tests/peers tests/readme

test-python-units:
	$(BIN)/pytest -m 'not slow' --benchmark-disable tests/unit bench/suites

test-python-processes:
	$(BIN)/pytest -m 'not slow' --benchmark-disable tests --ignore=tests/unit $(addprefix --ignore=,$(COMMANDS))

test-python-commands:
	$(BIN)/pytest -m 'not slow' --benchmark-disable $(COMMANDS)

# Bandwidths are measured, and all memory taken, with nothing beside them. Much of the rest waits most of the time, so it runs
# three at once, the longest first; a fourth at once starves the others.
SLOW_ALONE := tests/hosts tests/conformance/test_largest_pool.py
SLOW_RUNS := tests/faults/test_many_runs.py tests/faults/test_data_connections.py
SLOW_BACKENDS := tests/conformance tests/fuzz
SLOW_BUILDS := tests/sanitized tests/wheel $(COMMANDS)
SLOW_PARTS := test-slow-rest test-slow-runs test-rdma test-slow-backends test-slow-builds test-slow-faults test-slow-access

.PHONY: $(SLOW_PARTS)
test-slow: install-dev
	$(BIN)/pytest -m slow $(SLOW_ALONE)
	$(MAKE) --jobs=3 --output-sync=target $(SLOW_PARTS)

test-slow-runs:
	$(BIN)/pytest -m slow $(SLOW_RUNS)

test-slow-backends:
	$(BIN)/pytest -m slow $(SLOW_BACKENDS) $(addprefix --ignore=,$(SLOW_ALONE))

test-slow-builds:
	$(BIN)/pytest -m slow $(SLOW_BUILDS)

test-slow-faults:
	$(BIN)/pytest -m slow tests/faults $(addprefix --ignore=,$(SLOW_RUNS))

test-slow-access:
	$(BIN)/pytest -m slow tests/access

test-slow-rest:
	$(BIN)/pytest -m slow $(addprefix --ignore=,$(SLOW_ALONE) $(SLOW_BACKENDS) $(SLOW_BUILDS) tests/faults tests/access tests/rdma)

# A Debian kernel with Soft-RoCE, emulated by QEMU. What that takes is installed by package name (by root), or named.
test-rdma: install-dev
	$(BIN)/python tests/rdma/packages.py
	$(BIN)/pytest -m slow tests/rdma

# A part of test-slow, for FUZZ_SECONDS of each target (3 by default).
fuzz: install-dev
	$(BIN)/pytest -m slow tests/fuzz/test_search.py

sanitize: install-dev
	$(MAKE) --jobs=2 --output-sync=target sanitize-address sanitize-thread

sanitize-address: SANITIZE := address,undefined
sanitize-thread: SANITIZE := thread
sanitize-address sanitize-thread: install-dev
	$(CMAKE) -S . -B build/$@ -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DKVXFER_PYTHON=OFF -DKVXFER_TESTS=ON -DKVXFER_SANITIZE=$(SANITIZE) -Wno-dev > build/$@.log 2>&1 || (cat build/$@.log; false)
	$(CMAKE) --build build/$@ --parallel $(JOBS) >> build/$@.log 2>&1 || (cat build/$@.log; false)
	$(CTEST) build/$@

clean:
	rm -rf .venv .venv-peers build dist
