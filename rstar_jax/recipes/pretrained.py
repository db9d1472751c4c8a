"""Pretrained checkpoints by directory, file or name."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from rstar_jax.config import ModelConfig, RunConfig
from rstar_jax.storage import gguf, hf
from rstar_jax.storage.hf_config import model_config
from rstar_jax.text.tokenizer import FastTokenizer, load_tokenizer
from rstar_jax.types import UserError

SMOLLM = "smollm2-135m-instruct"

_OURS = (
    "dtype", "param_dtype", "remat", "logprob_chunk", "attention", "attention_block", "expert_block",
    "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A pretrained model that has been opened and checked, but not read. `content` is its `config.json`."""

    content: Mapping[str, Any]
    model: ModelConfig
    source: hf.TensorSource
    tokenizer: FastTokenizer


def default_dtype() -> str:
    """What matmuls use when nobody says otherwise: float32 on CPUs, where bfloat16 is slow, and bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def open_checkpoint(name: str, **ours: Any) -> Checkpoint:
    """A Hugging Face directory, a .gguf file, or `smollm2-135m-instruct` (installed by `make smollm`).

    `ours` are the settings of `ModelConfig` that a checkpoint does not have (`dtype`, `param_dtype`, `remat`, `attention`). Raises
    `UserError` for whatever does not fit.
    """
    path = gguf.find_smollm() if name == SMOLLM else pathlib.Path(name)
    source: gguf.GgufFile | hf.Safetensors
    if path.suffix == ".gguf":
        source = gguf.GgufFile(path)
        content, tokenizer = source.config, gguf.gguf_tokenizer(source)
    else:
        source = hf.Safetensors(path)
        content, tokenizer = hf.read_json(path / "config.json"), load_tokenizer(path)
    model = model_config(content, f"{path.name}/config.json" if path.is_dir() else path.name, **ours)
    hf.check_tensors(source, model)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, more than the model's {model.vocab_size}")
    return Checkpoint(content, model, source, tokenizer)


def open_tokenizer(name: str) -> FastTokenizer:
    """The tokenizer of a checkpoint, or of a directory that holds no more than a tokenizer."""
    if name == SMOLLM or pathlib.PurePath(name).suffix == ".gguf":
        return gguf.gguf_tokenizer(gguf.GgufFile(gguf.find_smollm() if name == SMOLLM else name))
    return load_tokenizer(name)


def resolve(config: RunConfig) -> RunConfig:
    """The run with what is known only when it starts: `model.dtype=auto` becomes `default_dtype()`; a run that starts from a
    checkpoint gets the checkpoint's architecture, which always wins, and its tokenizer unless the run names another."""
    if config.model.dtype == "auto":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=default_dtype()))
    if not config.checkpoint:
        return config
    model = open_checkpoint(config.checkpoint, **{name: getattr(config.model, name) for name in _OURS}).model
    tokenizer = config.checkpoint if config.text.tokenizer == "toy" else config.text.tokenizer
    text = dataclasses.replace(config.text, tokenizer=tokenizer)
    return dataclasses.replace(config, model=model, text=text).validate()
