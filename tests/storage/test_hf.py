"""Checkpoints in and out, against transformers' torch classes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from rstar_jax.config import MeshConfig, ModelConfig
from rstar_jax.model import kv_cache, qwen
from rstar_jax.model.logprobs import token_logprobs
from rstar_jax.model.sharding import make_mesh
from rstar_jax.storage import hf
from rstar_jax.storage.hf_config import config_json, model_config
from rstar_jax.types import UserError

SMALL = {
    "vocab_size": 68,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "eos_token_id": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 2048, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
MOE = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
KINDS = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2 tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 yarn": (transformers.Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 12}),
    "qwen3 tied": (transformers.Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 8}),
    "qwen3 biases": (transformers.Qwen3Config, {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 4}),
    "qwen3 yarn": (transformers.Qwen3Config, {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 16.0}}),
    "moe": (transformers.Qwen3MoeConfig, {**MOE, "norm_topk_prob": True}),
    "moe plain": (transformers.Qwen3MoeConfig, {**MOE, "norm_topk_prob": False, "num_key_value_heads": 1}),
    "llama": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama linear": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama tied biases": (transformers.LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
}
MESH = make_mesh(MeshConfig(data=1), jax.devices()[:1])
FORWARD = jax.jit(qwen.forward, static_argnames=("config", "mesh"))


@dataclasses.dataclass(frozen=True)
class Loaded:
    directory: object
    torch: torch.nn.Module
    config: ModelConfig
    params: object

    def logits(self, tokens, positions=None, segments=None, config=None):
        tokens = jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        segments = jnp.ones_like(tokens) if segments is None else segments
        config = config or self.config
        return qwen.logits(self.params, config, FORWARD(self.params, config, tokens, positions, segments).hidden_btd)

    def expected(self, tokens, **kwargs):
        with torch.no_grad():
            return self.torch(torch.tensor(np.asarray(tokens)), **kwargs).logits.numpy()


def torch_model(kind):
    maker, changes = KINDS[kind]
    torch.manual_seed(0)
    config = maker(**{**SMALL, **changes}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide one in the wrong place
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.ndim == 3 or "mlp.gate.weight" in name:  # experts, which transformers leaves as they were allocated
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def load(directory, mesh=MESH, **ours):
    config = model_config(hf.read_json(directory / "config.json"), "config.json", **ours)
    return config, hf.load_params(hf.Safetensors(directory), config, mesh)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind.replace(" ", "_"))
            model = torch_model(kind)
            model.save_pretrained(directory)
            made[kind] = Loaded(directory, model, *load(directory))
        return made[kind]

    return get


TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (3, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(checkpoints, kind):
    loaded = checkpoints(kind)
    expected = loaded.expected(TOKENS)
    assert expected.std() > 0.3
    np.testing.assert_allclose(loaded.logits(TOKENS), expected, atol=1e-4, rtol=0)
    blockwise = dataclasses.replace(loaded.config, attention="blockwise", attention_block=16)
    np.testing.assert_allclose(loaded.logits(TOKENS, config=blockwise), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2 yarn", "qwen3", "moe", "llama", "llama3", "llama linear"])
def test_logits_equal_behind_a_left_context_of_8192_positions(checkpoints, kind):
    """The last tokens of a sequence that ends at position 8,192; most of it in a cache, as a rollout has it."""
    loaded = checkpoints(kind)
    tokens = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (1, 8192))
    with torch.no_grad():  # eager attention of 8,192 positions takes gigabytes
        loaded.torch.set_attn_implementation("sdpa")
        expected = loaded.torch(torch.tensor(tokens), logits_to_keep=4).logits.numpy()
        loaded.torch.set_attn_implementation("eager")
    config = dataclasses.replace(loaded.config, attention="blockwise")
    rollout = qwen.unstack_layers(loaded.params)
    positions, ones = np.arange(8192)[None], np.ones((1, 8192), np.int32)
    cache = kv_cache.empty_cache(config, 1, 8192)
    cut = 8192 - 4
    out = FORWARD(rollout, config, tokens[:, :cut], positions[:, :cut], ones[:, :cut], cache)
    out = FORWARD(rollout, loaded.config, tokens[:, cut:], positions[:, cut:], ones[:, cut:], out.cache)
    np.testing.assert_allclose(qwen.logits(rollout, config, out.hidden_btd), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3 tied", "moe", "llama"])
def test_padded_and_packed_rows_equal_single_ones(checkpoints, kind):
    loaded = checkpoints(kind)
    first, second = TOKENS[0, :13], TOKENS[1, :20]
    packed = np.concatenate([first, second, np.zeros(7, int)])[None]
    positions = np.concatenate([np.arange(13), np.arange(20), np.arange(7)])[None]
    segments = np.repeat([1, 2, 0], [13, 20, 7])[None]
    ours = loaded.logits(packed, jnp.asarray(positions), jnp.asarray(segments))[0]
    np.testing.assert_allclose(ours[:13], loaded.expected(first[None])[0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours[13:33], loaded.expected(second[None])[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3 tied", "moe", "llama"])
def test_64_greedy_tokens_equal_generate(checkpoints, kind):
    loaded = checkpoints(kind)
    prompt = TOKENS[:1, :9]
    eos = loaded.torch.generation_config.eos_token_id
    loaded.torch.generation_config.eos_token_id = None
    expected = loaded.torch.generate(torch.tensor(prompt), do_sample=False, max_new_tokens=64, min_new_tokens=64, pad_token_id=0)
    loaded.torch.generation_config.eos_token_id = eos
    rollout, tokens = qwen.unstack_layers(loaded.params), list(prompt[0])
    cache = kv_cache.empty_cache(loaded.config, 1, 80)
    fed = 0
    for _ in range(64):
        piece = np.asarray(tokens[fed:])[None]
        positions = np.arange(fed, len(tokens))[None]
        out = FORWARD(rollout, loaded.config, piece, positions, np.ones_like(piece), cache)
        cache, fed = out.cache, len(tokens)
        tokens.append(int(qwen.logits(rollout, loaded.config, out.hidden_btd[:, -1]).argmax()))
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3 tied", "moe", "moe plain", "llama tied biases", "qwen3 yarn"])
def test_gradients_of_the_mean_log_prob_equal_those_of_torch(checkpoints, kind, tmp_path):
    loaded = checkpoints(kind)
    model = loaded.torch
    model.zero_grad()
    logits = model(torch.tensor(TOKENS)).logits[:, :-1]
    targets = torch.tensor(TOKENS[:, 1:])
    logits.log_softmax(-1).gather(-1, targets[..., None]).mean().backward()
    with torch.no_grad():  # read the gradients as if they were a checkpoint
        gradients = transformers.AutoModelForCausalLM.from_config(model.config)
        for target, source in zip(gradients.parameters(), model.parameters(), strict=True):
            target.copy_(source.grad)
    model.zero_grad()
    gradients.save_pretrained(tmp_path)
    expected = load(tmp_path)[1]

    def mean(params, config):
        tokens = jnp.asarray(TOKENS)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = qwen.forward(params, config, tokens, positions, jnp.ones_like(tokens)).hidden_btd
        return token_logprobs(params, config, hidden[:, :-1], tokens[:, 1:])[0].mean()

    for attention in ("dense", "blockwise"):
        config = dataclasses.replace(loaded.config, attention=attention, attention_block=16)
        ours = jax.jit(jax.grad(mean), static_argnums=1)(loaded.params, config)
        for (path, leaf), (_, like) in zip(*map(jax.tree_util.tree_leaves_with_path, (ours, expected)), strict=True):
            error = np.linalg.norm(leaf - like) / np.linalg.norm(like)
            assert error <= 1e-4, f"{attention} {jax.tree_util.keystr(path)} {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_in_transformers_and_comes_back_bit_for_bit(checkpoints, kind, tmp_path):
    loaded = checkpoints(kind)
    base = json.loads((loaded.directory / "config.json").read_text())
    hf.save_params(loaded.params, loaded.config, tmp_path, base=base, max_file_bytes=40_000)
    assert (tmp_path / hf.INDEX).exists()
    config, params = load(tmp_path)
    assert config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        np.testing.assert_array_equal(model.eval()(torch.tensor(TOKENS)).logits, loaded.expected(TOKENS))


def test_export_without_a_base_and_in_bfloat16(checkpoints, tmp_path):
    loaded = checkpoints("qwen3 tied")
    hf.save_params(loaded.params, loaded.config, tmp_path, dtype="bfloat16")
    assert not (tmp_path / hf.INDEX).exists()
    stored = safetensors.numpy.load_file(tmp_path / hf.SINGLE)
    assert {str(tensor.dtype) for tensor in stored.values()} == {"bfloat16"} and "lm_head.weight" not in stored
    _, params = load(tmp_path)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16).astype(jnp.float32)), params, loaded.params)


def test_every_device_reads_its_own_part_and_no_more(checkpoints):
    loaded = checkpoints("moe")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    source, largest = hf.Safetensors(loaded.directory), 0

    class Watched:
        path, shapes, dtype = source.path, source.shapes, source.dtype

        def read(self, name, index):
            nonlocal largest
            part = source.read(name, index)
            largest = max(largest, part.size / np.prod(source.shapes[name]))
            whole.add(name) if part.size == np.prod(source.shapes[name]) else parts.add(name)
            return part

    whole, parts = set(), set()
    params = hf.load_params(Watched(), loaded.config, mesh)
    assert any("q_proj" in name for name in parts) and not any("proj" in name for name in whole)
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    assert params["layers"]["q"]["kernel"].sharding.shard_shape((2, 32, 64)) == (2, 16, 32)


# --- refusals --------------------------------------------------------------------------------------------------------


def changed(loaded, tmp_path, tensors=None, **config):
    """A copy of a checkpoint with changes; a value of None takes a key away."""
    stored = safetensors.numpy.load_file(loaded.directory / hf.SINGLE)
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    safetensors.numpy.save_file(stored, tmp_path / hf.SINGLE)
    content = {**json.loads((loaded.directory / "config.json").read_text()), **config}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM' is not known"),
        ({"architectures": None}, "architectures must name one"),
        ({"model_type": "llama"}, "model_type 'llama' does not belong to Qwen2ForCausalLM"),
        ({"rope_parameters": None}, "has no rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "has no rope_theta"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0 and also 1000000.0 in rope_parameters"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}}, "rope_parameters.original_max_position"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}}, "factor is not known for rope_type 'default'"),
        ({"num_key_value_heads": None}, "has no num_key_value_heads"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_heads=8 is not a multiple of model.num_kv_heads=3"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "holds model.layers.1."),
        ({"intermediate_size": 41}, r"gate_proj.weight has shape \[40, 32\], but config.json asks for \[41, 32\]"),
        ({"tie_word_embeddings": True}, "ties the head to the embedding, but lm_head.weight differs"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(checkpoints, tmp_path, config, message):
    with pytest.raises(UserError, match=message) as error:
        load(changed(checkpoints("qwen2"), tmp_path, **config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
        ({"model.norm.weight": None, "model.norm.scale": np.ones(32, np.float32)}, "has no tensor model.norm.weight"),
        ({"model.extra": np.ones(2, np.float32)}, "holds model.extra, which"),
        ({"model.layers.1.self_attn.q_norm.weight": np.ones(4, np.float32)}, "holds model.layers.1.self_attn.q_norm.weight"),
        ({"model.norm.weight": np.ones(33, np.float32)}, r"model.norm.weight has shape \[33\]"),
        ({"model.norm.weight": np.ones(32, np.int8)}, "model.norm.weight is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(checkpoints, tmp_path, tensors, message):
    with pytest.raises(UserError, match=message):
        load(changed(checkpoints("qwen2"), tmp_path, tensors))


def test_a_tied_checkpoint_may_hold_the_same_head_twice_and_computed_frequencies(checkpoints, tmp_path):
    loaded = checkpoints("qwen3 tied")
    embedding = safetensors.numpy.load_file(loaded.directory / hf.SINGLE)["model.embed_tokens.weight"]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load(changed(loaded, tmp_path, {"lm_head.weight": embedding, **frequencies}))


def test_a_missing_norm_topk_prob_is_refused(checkpoints, tmp_path):
    with pytest.raises(UserError, match="has no norm_topk_prob"):
        load(changed(checkpoints("moe"), tmp_path, norm_topk_prob=None))


def sharded(checkpoints, tmp_path):
    loaded = checkpoints("qwen2")
    hf.save_params(loaded.params, loaded.config, tmp_path, max_file_bytes=20_000)
    return tmp_path, json.loads((tmp_path / hf.INDEX).read_text())


def test_a_truncated_file_is_refused_by_name(checkpoints, tmp_path):
    directory, index = sharded(checkpoints, tmp_path)
    file = directory / index["weight_map"]["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read: it is damaged or was cut short"):
        load(directory)
    file.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        load(directory)


def test_an_index_that_does_not_tell_the_truth_is_refused(checkpoints, tmp_path):
    directory, index = sharded(checkpoints, tmp_path)
    names = index["weight_map"]
    first, last = sorted(set(names.values()))[0], sorted(set(names.values()))[-1]

    def write(**changes):
        content = {k: v for k, v in {**names, **{k.replace("__", "."): v for k, v in changes.items()}}.items() if v}
        (directory / hf.INDEX).write_text(json.dumps({"weight_map": content}))

    write(model__norm__weight=first if names["model.norm.weight"] != first else last)
    with pytest.raises(UserError, match=r"holds model.norm.weight, but model.safetensors.index.json places it in"):
        load(directory)
    write(model__norm__weight=None)
    with pytest.raises(UserError, match="does not list it"):
        load(directory)
    write(model__ghost=first)
    with pytest.raises(UserError, match=r"places model.ghost in"):
        load(directory)
    write(model__norm__weight="missing.safetensors")
    with pytest.raises(UserError, match=r"names missing.safetensors, which is missing"):
        load(directory)
    write(model__norm__weight="../outside.safetensors")
    with pytest.raises(UserError, match="must lie in the same directory"):
        load(directory)


def test_other_formats_and_empty_directories_are_named(tmp_path):
    with pytest.raises(UserError, match="holds neither"):
        hf.Safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pytorch_model.bin is of another format"):
        hf.Safetensors(tmp_path)


def test_config_json_is_the_inverse_of_model_config():
    for kind, (maker, changes) in KINDS.items():
        original = {**SMALL, **changes}
        model_type = maker.model_type
        architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[model_type] + "ForCausalLM"
        config = model_config({**original, "architectures": [architecture], "model_type": model_type}, kind)
        assert model_config(config_json(config), kind) == config
    with pytest.raises(UserError, match="no Hugging Face architecture has qk_norm=True"):
        config_json(ModelConfig(qk_norm=True, mlp_bias=True))
