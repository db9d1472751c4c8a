"""Package description; exact versions of a tested environment stand in requirements.txt."""

from setuptools import find_packages, setup

setup(
    name="rstar_jax",
    version="0.1.0",
    description="Agentic reinforcement learning for language models in JAX: GRPO-RoC and SRL with a Python tool",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["rstar_jax", "rstar_jax.*"]),
    package_data={"rstar_jax": ["py.typed"], "rstar_jax.storage": ["*.html.j2"]},
    install_requires=[
        "jax",
        "flax",
        "optax",
        "orbax-checkpoint",
        "transformers",
        "grain",
        "chex",
        "absl-py",
        "safetensors",
        "math-verify",
        "cydifflib",
        "jinja2",
        "matplotlib",
        "numpy",
        "pyarrow",
        "tensorboardX",
        "tokenizers",
        "tqdm",
    ],
    # What an accelerator needs beside requirements.txt, at the version of its jax: a plugin speaks the interface of one jaxlib.
    extras_require={
        "rocm": ["jax==0.10.2", "jax-rocm7-plugin==0.10.2", "jax-rocm7-pjrt==0.10.2"],
        "cuda": ["jax==0.10.2", "jax-cuda13-plugin[with-cuda]==0.10.2", "jax-cuda13-pjrt==0.10.2"],
        "tpu": ["jax[tpu]==0.10.2", "libtpu==0.0.42.1"],
        "ray": ["ray"],
    },
)
