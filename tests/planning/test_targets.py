"""Targets, compiling for them, and the lines that say why it cannot be."""

import json
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rstar_jax.planning import targets
from rstar_jax.planning.hlo import Traffic
from rstar_jax.types import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def on():
    mesh = jax.make_mesh((8,), ("data",), devices=targets.devices(targets.CPU, 8), axis_types=(AxisType.Auto,))
    return lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def test_memory_and_communication_of_a_known_program(on):
    def f(total, x, kernel):  # rows in shards: the sum over all of them is an all-reduce of [64, 32] float32
        return total + x.T @ jnp.tanh(x @ kernel), jnp.sin(x)

    rows, kernel = on((1024, 64), "data"), on((64, 32))
    where = (kernel.sharding, rows.sharding)
    found = targets.measure(targets.compile_for(targets.CPU, jax.jit(f, donate_argnums=0, out_shardings=where), kernel, rows, kernel))
    assert found.argument == 2 * 64 * 32 * 4 + 1024 // 8 * 64 * 4
    assert 64 * 32 * 4 + 1024 // 8 * 64 * 4 <= found.output <= 64 * 32 * 4 + 1024 // 8 * 64 * 4 + 64  # and the tuple's pointers
    assert found.alias == 64 * 32 * 4
    assert found.temporary > 0
    assert found.total == found.argument + found.output - found.alias + found.temporary
    assert found.collectives == {"all-reduce": Traffic(1, 8192, 1, 8192)}
    assert found.lowering_seconds > 0 and found.compile_seconds > 0


def test_a_program_that_lies_nowhere_is_not_passed_off_as_a_targets():
    with pytest.raises(ValueError, match="compiled for cpu, not for mi300x"):
        targets._check_platform(targets.MI300X, jax.jit(lambda: jnp.zeros(3)).lower().compile())


def test_an_unknown_target_is_named():
    with pytest.raises(UserError, match="target 'mi999' is not known; choose one of mi300x, mi325x, h100, h200, cpu"):
        targets.find_target("mi999")


@pytest.mark.parametrize(
    ("count", "message"), [(12, "12 devices are not whole nodes"), (0, "0 devices"), (64, "has 8; set XLA_FLAGS=")]
)
def test_devices_that_cannot_be_had(count, message):
    with pytest.raises(UserError, match=message):
        targets.devices(targets.CPU, count)


@pytest.mark.parametrize(("target", "make"), [(targets.MI300X, "make rocm-compiler"), (targets.H100, "make cuda-compiler")])
def test_a_compiler_that_is_not_there_says_how_to_make_it(monkeypatch, tmp_path, target, make):
    with pytest.raises(UserError, match=f"this process has no compiler for {target.name}; run `{make}`"):
        targets.devices(target, 8)
    monkeypatch.setenv(f"VENV_{target.platform.upper()}", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=f"nothing holds no compiler for {target.name}; run `{make}`"):
        targets.compiler_environment(target)


def test_the_environment_has_the_stubs_and_does_not_look_for_devices(monkeypatch, tmp_path):
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / ".installed").touch()
    monkeypatch.setenv("VENV_ROCM", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    python, env = targets.rocm_environment()
    assert python == str(folder / "bin" / "python")
    assert env["LD_LIBRARY_PATH"] == f"{folder / 'stubs'}:/mine"
    assert env["XLA_FLAGS"] == "--mine --xla_gpu_autotune_level=0"
    assert env["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(("name", "count"), [("mi300x", 8), ("mi300x", 16), ("h100", 8), ("cpu", 16)])
def test_a_train_step_compiles_for_machines_that_are_not_here(name, count):
    try:
        python, env = targets.compiler_environment(targets.find_target(name), count)
    except UserError as error:
        pytest.skip(str(error))
    script = str(pathlib.Path(__file__).parent / "compile_tiny.py")
    done = subprocess.run([python, script, name, str(count)], env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fsdp = count // 2
    assert found["devices"] == count and found["kernels"]
    assert found["argument"] == 256 // fsdp * 128 * 4 + 64 // count * 256 * 4
    assert found["alias"] == 256 // fsdp * 128 * 4
    assert found["collectives"]["all-gather"]["size"] == 256 * 128 * 4  # the kernel, whole
    assert {"reduce-scatter", "all-reduce"} & set(found["collectives"])  # the gradient
