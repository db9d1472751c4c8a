"""The machines that a run is planned for, and compiling for them where they are not.

XLA compiles for a GPU from a description of it: sharding, fusion, code and buffers are those of the real machine; kernels are not
tuned, and nothing runs. The compiler is the plugin of that GPU (`make rocm-compiler`, `make cuda-compiler`), and a process that uses
it has to be started in its environment (`compiler_environment`). For the CPU this process will do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from rstar_jax.planning import hlo
from rstar_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of machine. `memory` in bytes; `bandwidth` of that memory, and `node_bandwidth` and `network_bandwidth` of a device to
    the others of its node and to other nodes, in bytes/s and one direction; `flops`: dense bf16 FLOP/s. The vendor's figures: what a
    program reaches is less. `platform` is XLA's name of the compiler, `description` what it is told of the chip."""

    name: str
    platform: str
    memory: int
    bandwidth: float
    flops: float
    devices_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    description: str = ""


GIB = 2**30
NETWORK = 50e9  # one 400 Gb/s adapter for each GPU, as in NVIDIA's DGX H100 and H200 and in clouds' MI300X nodes

# XLA's GpuTargetConfig. Its own text for MI300 has 270,566,162,432 bytes at 6.81e12 bytes/s, which is rather an MI325X: here are the
# vendor's figures of each chip. XLA weighs fusions and schedules with them, so that temporary buffers may depend on them.
_CDNA3 = """
gpu_device_info {{
  core_count: 304  threads_per_warp: 64  fpus_per_core: 128  clock_rate_ghz: 2.1
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65536  block_dim_limit_z: 65536
  registers_per_core_limit: 131072  registers_per_block_limit: 131072
  shared_memory_per_core: 65536  shared_memory_per_block: 65536  shared_memory_per_block_optin: 65536
  l2_cache_size: 4194304  memory_bandwidth: {bandwidth:.0f}  device_memory_size: {memory}
  rocm_compute_capability {{ gcn_arch_name: "gfx942:sramecc+:xnack-" }}
}}
platform_name: "ROCM"
dnn_version_info {{ }}
device_description_str: "{name}"
"""

_HOPPER = """
gpu_device_info {{
  core_count: 132  threads_per_warp: 32  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800  memory_bandwidth: {bandwidth:.0f}  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9  minor: 0  feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10 }}
device_description_str: "{name}"
"""

# AMD Instinct MI300X and MI325X data sheets: 192 GB at 5.3 TB/s and 256 GB at 6 TB/s, 1,307.4 TFLOP/s dense bf16; eight to a
# platform, seven Infinity Fabric links a device of 128 GB/s, both directions together.
MI300X = Target("mi300x", "rocm", 192 * GIB, 5.3e12, 1307.4e12, 8, 448e9, NETWORK, _CDNA3)
MI325X = Target("mi325x", "rocm", 256 * GIB, 6.0e12, 1307.4e12, 8, 448e9, NETWORK, _CDNA3)
# NVIDIA H100 (SXM) and H200 data sheets: 80 GB at 3.35 TB/s and 141 GB at 4.8 TB/s, 989 TFLOP/s dense bf16 (half of what is printed,
# which is with sparsity); NVLink 900 GB/s, both directions together.
H100 = Target("h100", "cuda", 80 * GIB, 3.35e12, 989e12, 8, 450e9, NETWORK, _HOPPER)
H200 = Target("h200", "cuda", 141 * GIB, 4.8e12, 989e12, 8, 450e9, NETWORK, _HOPPER)
# No vendor's figures: two cores of a machine that tests run on, f32; "devices" share its memory.
CPU = Target("cpu", "cpu", 16 * GIB, 20e9, 131e9, 8, 20e9, 20e9)

TARGETS: Mapping[str, Target] = {target.name: target for target in (MI300X, MI325X, H100, H200, CPU)}


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """XLA's plugin for a platform: its package, the environment it is installed in, and a library that it cannot do without."""

    module: str
    folder: str
    library: str = ""

    @property
    def make(self) -> str:
        return f"run `make {self.folder.removeprefix('.venv-')}-compiler`"


_COMPILERS = {
    "rocm": _Compiler("jax_plugins.xla_rocm7", ".venv-rocm", "libamdhip64.so.7"),
    "cuda": _Compiler("jax_plugins.xla_cuda13", ".venv-cuda"),
}


def find_target(name: str) -> Target:
    """The target of this name. Raises `UserError` for one that is not known."""
    if name not in TARGETS:
        raise UserError(f"target {name!r} is not known; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def compiler_environment(target: Target, count: int = 8) -> tuple[str, dict[str, str]]:
    """(Python, environment variables) of a process that can compile for `count` devices of the target.

    Raises `UserError` when the compiler is not installed. VENV_ROCM and VENV_CUDA name other folders, as they do for make.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "cpu":
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
        return sys.executable, env
    compiler = _COMPILERS[target.platform]
    default = pathlib.Path(__file__).resolve().parents[2] / compiler.folder
    folder = pathlib.Path(env.get(f"VENV_{target.platform.upper()}") or default).absolute()
    python, stubs = folder / "bin" / "python", folder / "stubs"
    if not python.exists() or not (folder / ".installed").exists():
        raise UserError(f"{folder} holds no compiler for {target.name}; {compiler.make}")
    # Tuning measures kernels on a device, of which there is none.
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    if compiler.library:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(stubs), env.get("LD_LIBRARY_PATH"))))
    return str(python), env


def rocm_environment() -> tuple[str, dict[str, str]]:
    """`compiler_environment` of AMD's GPUs."""
    return compiler_environment(MI300X)


def devices(target: Target, count: int) -> list[Any]:
    """`count` devices to make a mesh of and compile for; on the CPU they are this process's. Beyond one node, whole nodes only.

    Raises `UserError` when this process cannot compile for the target, or the count cannot be had.
    """
    nodes = math.ceil(count / target.devices_per_node)
    if count < 1 or (nodes > 1 and count % target.devices_per_node):
        raise UserError(f"{count} devices are not whole nodes; {target.name} has {target.devices_per_node} in a node")
    if target.platform == "cpu":
        present = jax.devices("cpu")
        if len(present) < count:
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            raise UserError(f"{count} CPU devices were asked for, and this process has {len(present)}; set {flag}")
        return present[:count]
    return list(_topology(target, nodes, count // nodes).devices)


def _topology(target: Target, nodes: int, per_node: int) -> topologies.TopologyDescription:
    compiler = _COMPILERS[target.platform]
    try:
        importlib.import_module(compiler.module)
        if compiler.library:
            ctypes.CDLL(compiler.library)
    except (ImportError, OSError):
        raise UserError(f"this process has no compiler for {target.name}; {compiler.make}, and start it in that environment") from None
    text = target.description.format(**dataclasses.asdict(target))
    # The plugin for AMD declines to be registered where no GPU is; NVIDIA's does not ask.
    with mock.patch("jax._src.hardware_utils.num_available_amd_gpus", return_value=1):
        try:
            return topologies.get_topology_desc(
                target.name, platform=target.platform, target_config=text, topology=f"1x{nodes}x{per_node}"
            )
        except NotImplementedError:
            raise UserError(f"jax looked for plugins before {target.name} was asked for; ask for the target's devices first") from None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a target, and the seconds that took."""

    executable: jax.stages.Compiled
    lowering_seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a compiled program takes: bytes of each device, and collectives by kind.

    `alias` are bytes of the output that lie in donated arguments. `total` is what is held while it runs.
    """

    argument: int
    output: int
    alias: int
    temporary: int
    collectives: Mapping[str, hlo.Traffic]
    lowering_seconds: float
    compile_seconds: float

    @property
    def total(self) -> int:
        return self.argument + self.output - self.alias + self.temporary


def compile_for(target: Target, jitted: Any, *arguments: Any, **keywords: Any) -> Compiled:
    """Compile a jitted function for arguments that are only described: `jax.ShapeDtypeStruct`s with shardings on a mesh of
    `devices(target, ...)`. Static arguments are given as they are.

    Raises `ValueError` when nothing that the program uses lies on the target: jax then compiles it for this process's own device.
    """
    begin = time.perf_counter()
    lowered = jitted.trace(*arguments, **keywords).lower(lowering_platforms=(target.platform,))
    middle = time.perf_counter()
    executable = lowered.compile()
    end = time.perf_counter()
    _check_platform(target, executable)
    return Compiled(executable, middle - begin, end - middle)


def _check_platform(target: Target, executable: jax.stages.Compiled) -> None:
    found = {device.platform for sharding in jax.tree.leaves(executable.output_shardings) for device in sharding.device_set}
    if found - {"cpu" if target.platform == "cpu" else "gpu"}:
        raise ValueError(f"the program was compiled for {', '.join(found)}, not for {target.name}: give it out_shardings")


def measure(compiled: Compiled) -> Measured:
    """Read a compiled program's memory and communication."""
    memory = compiled.executable.memory_analysis()
    assert memory is not None  # no compiler of TARGETS is without one
    return Measured(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        hlo.collectives(compiled.executable.as_text() or ""),
        compiled.lowering_seconds,
        compiled.compile_seconds,
    )
