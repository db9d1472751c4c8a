"""Fixtures of the tests of the engine."""

import concurrent.futures
import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from engines import MODEL

from rstar_jax.model import qwen


@pytest.fixture(scope="module")
def params():
    params = jax.jit(qwen.init, static_argnums=0)(MODEL, jax.random.key(0))
    params["ends"]["embedding"] = params["ends"]["embedding"] * 30  # a policy with opinions: entropy well under log V
    return params


@pytest.fixture(scope="module")
def device():
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        yield executor
