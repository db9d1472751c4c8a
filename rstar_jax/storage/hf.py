"""Weights of Hugging Face checkpoints: safetensors in and out, each device's part by itself.

Reading: every process reads, for each of its devices, the part of a tensor that the device holds, and nothing else. On the host
there is at a time one device's part of one parameter (stacked over layers) beside one tensor's slice of it: for Qwen3-14B on 64
devices a quarter of a gigabyte. Writing gathers one tensor at a time and holds one file's worth (`max_file_bytes`) in process 0.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import ModelConfig
from rstar_jax.model import names, qwen
from rstar_jax.model.sharding import TRAINING_RULES, Rules, shardings
from rstar_jax.storage.hf_config import config_json
from rstar_jax.types import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")  # that weights may be stored in
MAX_FILE_BYTES = 5_000_000_000

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed from config.json
Index = tuple[slice, ...]


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, in Hugging Face's layout."""

    @property
    def path(self) -> pathlib.Path: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def dtype(self, name: str) -> str:
        """`F32`, `BF16`, ... as safetensors names them."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A part of a tensor, read from disk and no more than that."""
        ...


class Safetensors:
    """The weights of a checkpoint directory: `model.safetensors`, or several files with an index. Raises `UserError` for files that
    are missing, cut short or damaged, and for an index that does not tell the truth."""

    def __init__(self, directory: pathlib.Path):
        self.path = directory
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; a checkpoint is a directory with config.json and {SINGLE}")
        single, index = directory / SINGLE, directory / INDEX
        listed: dict[str, str] | None = None
        if single.is_file():
            files = [SINGLE]
        elif index.is_file():
            listed = _weight_map(index)
            files = sorted(set(listed.values()))
        else:
            other = next((f.name for f in sorted(directory.iterdir()) if f.suffix in (".bin", ".pt", ".pth", ".ckpt")), None)
            hint = f" ({other} is of another format: convert it with transformers' save_pretrained)" if other else ""
            raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")
        self._files = {name: _open(directory / name) for name in files}
        self._where: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for name, file in self._files.items():
            for tensor in file.keys():  # noqa: SIM118 - not a mapping
                if listed is not None and listed.get(tensor) != name:
                    said = f"places it in {listed[tensor]}" if tensor in listed else "does not list it"
                    raise UserError(f"{directory / name} holds {tensor}, but {INDEX} {said}")
                part = file.get_slice(tensor)
                self._where[tensor], self._shapes[tensor], self._dtypes[tensor] = file, tuple(part.get_shape()), part.get_dtype()
        for tensor, name in (listed or {}).items():
            if tensor not in self._where:
                raise UserError(f"{index} places {tensor} in {name}, which does not hold it")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        return np.asarray(self._where[name].get_slice(name)[index])


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    content = read_json(index)
    listed = content.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files")
    for name in sorted(set(listed.values())):
        if pathlib.PurePath(name).name != name:
            raise UserError(f"{index} names the file {name!r}; it must lie in the same directory")
        if not (index.parent / name).is_file():
            raise UserError(f"{index} names {name}, which is missing")
    return listed


def _open(file: pathlib.Path) -> Any:
    try:
        return safetensors.safe_open(str(file), framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: it is damaged or was cut short ({error})") from None


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object")
    return content


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """Raises `UserError`, by name, for a tensor that is missing, has another shape or a dtype that weights cannot have, or that the
    model has no place for."""
    abstract = qwen.abstract_params(config)
    expected: set[str] = set()
    for path, entry in names.stored(config).items():
        whole = _leaf(abstract, path).shape
        for leading, name in entry.tensors(config):
            shape = whole[len(leading) :]
            shape = shape[::-1] if entry.transposed else shape
            expected.add(name)
            if name not in source.shapes:
                raise UserError(f"{source.path} has no tensor {name}, which config.json asks for")
            if source.shapes[name] != shape:
                raise UserError(f"{source.path}: {name} has shape {list(source.shapes[name])}, but config.json asks for {list(shape)}")
            if source.dtype(name) not in DTYPES:
                raise UserError(f"{source.path}: {name} is stored as {source.dtype(name)}; weights can be {', '.join(DTYPES)}")
    for name in source.shapes:
        if name in expected or _IGNORED.fullmatch(name):
            continue
        if name == names.HEAD and config.tie_embeddings:
            whole_tensor = tuple(slice(0, size) for size in source.shapes[name])
            if source.shapes[name] == source.shapes[names.EMBEDDING] and np.array_equal(
                source.read(name, whole_tensor), source.read(names.EMBEDDING, whole_tensor)
            ):
                continue
            raise UserError(f"{source.path}: config.json ties the head to the embedding, but {name} differs from {names.EMBEDDING}")
        raise UserError(f"{source.path} holds {name}, which a model of this config.json does not have")


def load_params(source: TensorSource, config: ModelConfig, mesh: Mesh, rules: Rules = TRAINING_RULES) -> qwen.Params:
    """The parameters in stacked form, in `config.param_dtype`, each part read straight onto its device. Everything is checked
    (`check_tensors`) before anything is read."""
    check_tensors(source, config)
    entries = names.stored(config)
    places = shardings(qwen.param_axes(config), mesh, rules)

    def leaf(path: Any, like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        entry = entries[tuple(key.key for key in path)]
        tensors = dict(entry.tensors(config))
        on_device: dict[Any, jax.Array] = {}
        by_part: dict[Any, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(like.shape).items():
            part = tuple(piece.indices(size)[:2] for piece, size in zip(index or (), like.shape, strict=True))
            by_part.setdefault(part, []).append(device)
        for part, devices in by_part.items():
            values = _read_part(source, tensors, entry.transposed, part, like.dtype)
            for device in devices:
                on_device[device] = jax.device_put(values, device)
            jax.block_until_ready([on_device[device] for device in devices])
            del values
        arrays = [on_device[device] for device in sharding.addressable_devices_indices_map(like.shape)]
        return jax.make_array_from_single_device_arrays(like.shape, sharding, arrays)

    return jax.tree_util.tree_map_with_path(leaf, qwen.abstract_params(config), places)


def _read_part(
    source: TensorSource, tensors: Mapping[tuple[int, ...], str], transposed: bool, part: tuple[tuple[int, int], ...], dtype: Any
) -> np.ndarray:
    """The values of one device's part [start, stop) of a parameter."""
    values = np.empty([stop - start for start, stop in part], dtype)
    for leading, name in tensors.items():
        if any(not start <= i < stop for i, (start, stop) in zip(leading, part, strict=False)):
            continue
        inner = [slice(start, stop) for start, stop in part[len(leading) :]]
        piece = source.read(name, tuple(inner[::-1] if transposed else inner))
        values[tuple(i - start for i, (start, _) in zip(leading, part, strict=False))] = piece.T if transposed else piece
    return values


def _leaf(tree: Any, path: names.Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def save_params(
    params: qwen.Params,
    config: ModelConfig,
    directory: pathlib.Path,
    *,
    dtype: str = "float32",
    base: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the parameters (stacked form) and `config.json` into `directory`, as transformers loads them. `dtype` is that of the file:
    `float32`, `bfloat16` or `float16`. `base` is the `config.json` that training began from (see `hf_config.config_json`).

    With several processes all must call this; process 0 writes.
    """
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    content = {**config_json(config, base), "torch_dtype": dtype}
    content.pop("dtype", None)
    sizes = {
        name: int(np.prod(_leaf(params, path).shape[len(leading) :])) * target.itemsize
        for path, entry in names.stored(config).items()
        for leading, name in entry.tensors(config)
    }
    files = _files(sizes, max_file_bytes)
    last = {file: name for name, file in files.items()}
    writes = jax.process_index() == 0
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
    batch: dict[str, np.ndarray] = {}
    for name, tensor in _tensors(params, config):
        if writes:
            batch[name] = np.ascontiguousarray(tensor.astype(target))
        if writes and last[files[name]] == name:
            safetensors.numpy.save_file(batch, str(directory / files[name]), metadata={"format": "pt"})
            batch = {}
    if not writes:
        return
    if set(files.values()) != {SINGLE}:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        _write_json(directory / INDEX, index)
    _write_json(directory / "config.json", content)


def _files(sizes: Mapping[str, int], limit: int) -> dict[str, str]:
    """The file of each tensor: filled in order up to `limit` bytes each."""
    numbers: dict[str, int] = {}
    number = used = 0
    for name, size in sizes.items():
        if used and used + size > limit:
            number, used = number + 1, 0
        numbers[name], used = number, used + size
    count = number + 1
    return {name: SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for name, i in numbers.items()}


def _tensors(params: qwen.Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, gathered from all devices, one at a time."""
    for path, entry in names.stored(config).items():
        value = _leaf(params, path)
        for leading, name in entry.tensors(config):
            tensor = np.asarray(_gathered(value, leading))
            yield name, tensor.T if entry.transposed else tensor


def _gathered(value: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.jit(_take, out_shardings=everywhere)(value, leading)
    return _take_here(value, leading)


def _take(value: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    for i in leading:
        value = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)
    return value


_take_here = jax.jit(_take)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
