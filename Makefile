# Everything a developer types. The environment is made in .venv (reused; remove it to start anew).
# Needs python3 (with headers), a C++20 compiler and git; CMake, Ninja and clang-format come from PyPI.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# On a machine with a GPU the local build has CUDA; elsewhere compiling kernels would only take time.
GPU := $(wildcard /dev/nvidiactl)$(shell command -v nvidia-smi)
OOMB_CUDA ?= $(if $(GPU),auto,off)
export OOMB_CUDA
# Waiting threads of torch would spin on cores that others need.
export OMP_WAIT_POLICY ?= passive

.PHONY: help dev demo train-demo test test-cpp test-py test-slow test-release test-asan test-tsan test-gpu in-place bench fmt check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(VENV)/.installed: requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The package in place, compiled in build/dev together with the C++ tests.
$(VENV)/.built: $(VENV)/.installed setup.py CMakeLists.txt $(wildcard cmake/*)
	PATH="$(CURDIR)/$(BIN):$$PATH" OOMB_BUILD_DIR=build/dev \
	CMAKE_ARGS="-DOOMB_BUILD_TESTS=ON -DOOMB_WERROR=ON" \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	touch $@

dev: $(VENV)/.built ## the environment and an up-to-date build
	@$(BIN)/cmake --build build/dev

demo: dev ## train on a long text and print what the README shows
	$(BIN)/oomb demo

train-demo: dev ## a training run from YAML on a long text, to its report; goes on where it was stopped
	test -d oomb-demo/text || $(BIN)/oomb demo --quick
	$(BIN)/oomb train examples/train_full.yaml --resume

test: test-cpp test-py ## every test that needs no GPU and no patience

test-cpp: dev ## GoogleTest
	$(BIN)/ctest --test-dir build/dev --output-on-failure --parallel 2 --no-tests=error

# Tests of tiny models use one core each, so a process for each core of four at most takes a share of
# them, and helps another out when it is done. WORKERS=0 runs them in one process.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
  --durations 40 --durations-min 10

test-py: dev ## pytest
	$(PYTEST) -m "not slow and not gpu"

# One of them runs the extension of the preset asan, which test-asan has compiled where it ran before.
test-slow: dev ## the long property and mutation tests
	$(call sanitized_build,asan,--target _C)
	$(PYTEST) -m "slow and not release and not gpu"

test-release: dev ## before a release: the longest series, of which the other tests run a part
	$(PYTEST) -m "release and not gpu"

# $(call sanitized_build,preset,options of the build)
define sanitized_build
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --preset $(1) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/$(1) $(2)
endef

# $(call sanitized,preset)
define sanitized
	$(call sanitized_build,$(1))
	$(BIN)/ctest --test-dir build/$(1) --output-on-failure --parallel 2 --no-tests=error
endef

test-asan: $(VENV)/.installed ## GoogleTest under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call sanitized,asan)

test-tsan: $(VENV)/.installed ## memory, paging and offload under ThreadSanitizer
	$(call sanitized,tsan)

# These three use an environment that already has torch (PYTHON=...), install nothing and need no
# network: the extension is compiled in place and found through PYTHONPATH. As in an installation, a
# warning of another compiler does not stop them: GCC 13 gives some for pybind11's own code.
in-place:
	cmake -S . -B build/in-place -G Ninja -DOOMB_CUDA=$(OOMB_CUDA) -DOOMB_WERROR=OFF \
	  -DPython_EXECUTABLE=$$($(PYTHON) -c 'import sys; print(sys.executable)')
	cmake --build build/in-place

test-gpu: in-place ## the tests that need a GPU, in an environment that has torch
	PYTHONPATH=python $(PYTHON) -m pytest -m gpu tests/python/gpu

bench: in-place ## the benchmarks, in an environment that has torch; bench/cpu_* where there is no GPU
	for script in bench/$(if $(GPU),,cpu_)*.py; do \
	  echo "== $$script"; PYTHONPATH=python $(PYTHON) $$script || exit 1; done

CXX_FILES = $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.inl')

fmt: $(VENV)/.installed ## format everything
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(VENV)/.installed ## formatting, lint, types, layers
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_layers.py

clean: ## remove builds, keep the environment
	rm -rf build python/oomb/_C*.so $(VENV)/.built
