# A fresh machine with Python 3.11 needs `make quickstart` and `make test`; the other targets are their parts.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin/python
# Temporaries of a step on huge pages: a quarter less time per update on Linux, ignored elsewhere.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
WORKDIR ?= runs/quickstart

.PHONY: quickstart test install install-test lint clean

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

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: requirements.txt setup.py | $(VENV)/.created
	$(VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements.txt
	$(VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-test: requirements-test.txt $(VENV)/.installed
	$(VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) .cache
