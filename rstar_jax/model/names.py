"""The names that parameters have in Hugging Face checkpoints of the Qwen and Llama families.

A parameter of ours is one array, or a stack of them over layers (and experts); in a checkpoint each is a tensor of its own, and
matrices are stored [out, in] where ours are [in, out].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from rstar_jax.config import ModelConfig

Path = tuple[str, ...]
"""A parameter's place in the tree, such as ("layers", "q", "kernel")."""


class Stored(NamedTuple):
    """Where a parameter lies in a checkpoint: `pattern` with {layer} and {expert} to fill in; `transposed` where the last two axes
    are swapped."""

    pattern: str
    transposed: bool

    def tensors(self, config: ModelConfig) -> Iterator[tuple[tuple[int, ...], str]]:
        """(leading indices of the parameter, name of the tensor) of every part, in order."""
        axes = []
        if "{layer}" in self.pattern:
            axes.append(range(config.num_layers))
        if "{expert}" in self.pattern:
            axes.append(range(config.num_experts))
        for index in itertools.product(*axes):
            yield index, self.pattern.format(**dict(zip(("layer", "expert"), index, strict=False)))


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def stored(config: ModelConfig) -> dict[Path, Stored]:
    """Every parameter of the model. The tree is that of `qwen.init`."""
    names: dict[Path, Stored] = {
        ("ends", "embedding"): Stored(EMBEDDING, False),
        ("ends", "final_norm", "scale"): Stored("model.norm.weight", False),
    }
    if not config.tie_embeddings:
        names["ends", "head"] = Stored(HEAD, False)

    def layer(ours: str, leaf: str, theirs: str, transposed: bool) -> None:
        names["layers", *ours.split("/"), leaf] = Stored("model.layers.{layer}." + theirs, transposed)

    def linear(ours: str, theirs: str, bias: bool) -> None:
        layer(ours, "kernel", f"{theirs}.weight", True)
        if bias:
            layer(ours, "bias", f"{theirs}.bias", False)

    layer("attention_norm", "scale", "input_layernorm.weight", False)
    layer("mlp_norm", "scale", "post_attention_layernorm.weight", False)
    for ours in ("q", "k", "v"):
        linear(ours, f"self_attn.{ours}_proj", config.qkv_bias)
    linear("o", "self_attn.o_proj", config.o_bias)
    if config.qk_norm:
        layer("q_norm", "scale", "self_attn.q_norm.weight", False)
        layer("k_norm", "scale", "self_attn.k_norm.weight", False)
    if config.num_experts:
        layer("experts", "router", "mlp.gate.weight", True)
        for ours in ("gate", "up", "down"):
            layer("experts", ours, "mlp.experts.{expert}." + f"{ours}_proj.weight", True)
    else:
        for ours in ("gate", "up", "down"):
            linear(ours, f"mlp.{ours}_proj", config.mlp_bias)
    return names
