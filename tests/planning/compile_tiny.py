"""Compile a small train step for a target and print what it takes; `test_targets.py` runs this in the target's environment."""

import dataclasses
import json
import sys

from rstar_jax.planning import targets

KERNELS = {"rocm": b"amdhsa.kernels", "cuda": b".note.nv", "cpu": b"ELF"}  # in what the platform's code generator writes


def main(name, count):
    target = targets.find_target(name)
    devices = targets.devices(target, count)

    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, count // 2), ("data", "fsdp"), devices=devices, axis_types=(AxisType.Auto,) * 2)

    def on(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def step(kernel, x):
        return kernel - jax.grad(lambda kernel: jnp.sum(jnp.tanh(x @ kernel) ** 2))(kernel)

    kernel, x = on((256, 128), "fsdp"), on((64, 256), ("data", "fsdp"))
    compiled = targets.compile_for(target, jax.jit(step, donate_argnums=0, out_shardings=kernel.sharding), kernel, x)
    code = compiled.executable.runtime_executable().serialize()
    return {"devices": len(devices), "kernels": KERNELS[target.platform] in code, **dataclasses.asdict(targets.measure(compiled))}


print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
