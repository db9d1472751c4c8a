"""Eight virtual CPU devices and the persistent compilation cache for the whole suite."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
_CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import gc  # noqa: E402 - jax reads the environment when it is imported

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs are memory maps, of which a process may have 65,530; the suite compiles more than fit. What a later module
    needs again comes from the persistent cache."""
    yield
    gc.collect()
    jax.clear_caches()
    gc.collect()
