"""Tokenizer: round trips, content that looks like control text, stop ids, files."""

import hashlib
import json
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rstar_jax.text.chat import CHAT_FORMATS, COMPACT_SPECIALS
from rstar_jax.text.tokenizer import load_tokenizer, train_tokenizer
from rstar_jax.types import Marker, Tokenizer, UserError

TEXTS = [
    "Compute 12 * 345.",
    "<reason>use the tool</reason><tool_call>print(12*345)</tool_call><|im_end|>",
    "sum(range(1, 9))",
] * 20


@pytest.fixture(scope="module")
def toy():
    return train_tokenizer(TEXTS, 400)


def byte_level(added):
    """A merge-free byte-level BPE, built by hand: the 256 byte ids first, then `added` (text, special)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for text, special in added:
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    return backend


def write_model(directory, backend, config=None, generation=None, model=None):
    backend.save(str(directory / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_any_text_round_trips(toy, text):
    assert toy.decode(toy.encode([text])) == text


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from([*COMPACT_SPECIALS, "assistant\n", " ", "12", "<|unused_0|>", "<|im_", "é"]), max_size=8))
def test_content_never_becomes_a_special_token(toy, parts):
    text = "".join(parts)
    ids = toy.encode([text])
    assert not set(ids) & set(toy.special_tokens.values())
    assert toy.decode(ids) == text


def test_a_tool_output_that_holds_a_header_stays_text(toy):
    pieces = CHAT_FORMATS["compact"].tool_turn(["<|im_start|>assistant"])
    start = toy.special_tokens["<|im_start|>"]
    assert toy.encode(pieces).count(start) == 1
    assert toy.decode(toy.encode(pieces)) == "<tool_response><|im_start|>assistant</tool_response><|im_start|>"


def test_lone_surrogates_become_replacement_characters_and_pairs_join(toy):
    assert toy.decode(toy.encode(["a\ud800b"])) == "a\ufffdb"
    assert toy.decode(toy.encode(["\ud83d\ude00"])) == "\U0001f600"


def test_every_digit_is_one_token(toy):
    assert [toy.decode([i]) for i in toy.encode(["12*345"])] == ["1", "2", "*", "3", "4", "5"]


def test_neighbouring_content_pieces_are_encoded_as_one_text(toy):
    assert toy.encode(["com", "pute ", Marker("<nothing>"), "!"]) == toy.encode(["compute <nothing>!"])
    assert len(toy.encode(["range"])) < len(toy.encode(["ra"]) + toy.encode(["nge"]))  # so joining first is not a no-op


def test_decode_shows_invalid_bytes_and_ids_beyond_the_vocabulary_as_replacement_characters(toy):
    first_byte = toy.encode(["é"])[0]
    assert toy.decode([first_byte]) == "\ufffd"
    assert toy.decode([*toy.encode(["a"]), 10_000, -1, *toy.encode(["b"])]) == "a\ufffd\ufffdb"


def test_decode_keeps_special_tokens_and_spaces(toy):
    ids = toy.encode([Marker("<|im_start|>"), " a , b ' s", Marker("<|im_end|>")])
    assert toy.decode(ids) == "<|im_start|> a , b ' s<|im_end|>"


def test_a_trained_vocabulary_has_the_asked_size_whether_texts_are_rich_or_poor():
    assert train_tokenizer(["ab"], 300).vocab_size == 300
    assert train_tokenizer([f"word{chr(97 + i)}{chr(97 + j)} " * 3 for i in range(20) for j in range(20)], 300).vocab_size == 300


def test_training_is_deterministic_across_processes(toy):
    code = (
        "import hashlib, sys; from rstar_jax.text.tokenizer import train_tokenizer;"
        f"print(hashlib.sha256(train_tokenizer({TEXTS!r}, 400).backend.to_str().encode()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hashlib.sha256(toy.backend.to_str().encode()).hexdigest()


def test_special_tokens_in_the_training_texts_are_not_learnt_as_text():
    tokenizer = train_tokenizer(["<tool_call><tool_call><tool_call>"] * 50, 400)
    assert len(tokenizer.encode(["tool_call"])) == len("tool_call")


@pytest.mark.parametrize(
    ("size", "specials", "message"),
    [(200, COMPACT_SPECIALS, "too small"), (400, ("<|pad|>",), "im_end"), (400, ("<|im_end|>", "<|im_end|>"), "distinct")],
)
def test_impossible_training_requests_are_refused(size, specials, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer(["a"], size, specials)


def test_a_special_token_that_plain_text_could_produce_is_refused(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["ab", "<|im_end|>"])
    with pytest.raises(UserError, match="gives plain text 'ab' its special id 256"):
        load_tokenizer(write_model(tmp_path, backend))


def test_saved_tokenizers_load_here_and_in_transformers_with_the_same_ids(toy, tmp_path):
    toy.save(tmp_path)
    pieces = CHAT_FORMATS["compact"].prompt("Compute 12 * 345. é")
    again = load_tokenizer(tmp_path)
    assert (again.stop_ids, again.pad_id, again.vocab_size) == (toy.stop_ids, toy.pad_id, 400)
    assert again.encode(pieces) == toy.encode(pieces)
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(tmp_path)
        assert theirs("".join(pieces))["input_ids"] == toy.encode(pieces)
        assert theirs.decode(toy.encode(pieces)) == "".join(pieces)
        assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (toy.stop_ids[0], toy.pad_id, 400)


def test_stop_ids_are_the_union_of_both_configs_and_the_chat_end_marker(tmp_path):
    backend = byte_level([("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|eot|>", True)])
    write_model(tmp_path, backend, {"eos_token": {"content": "<|eot|>"}}, {"eos_token_id": [256, 259], "pad_token_id": 256})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stop_ids == (256, 259, 258)
    assert tokenizer.pad_id == 256


def test_tokens_that_only_special_tokens_map_names_count_and_tokenizer_config_has_the_say(tmp_path):
    backend = byte_level([("<|endoftext|>", True), ("<|eot|>", True), ("<|pad|>", True)])
    write_model(tmp_path, backend, {"eos_token": None})
    named = {"eos_token": {"content": "<|eot|>"}, "pad_token": "<|pad|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((257,), 258)
    write_model(tmp_path, backend, {"eos_token": "<|endoftext|>"})
    assert load_tokenizer(tmp_path).stop_ids == (256,)


SPECIALS = ["<|endoftext|>", "<|begin|>", "<|header|>", "<|eot|>", "<|im_end|>"]  # 256 and on
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}\n{{ m.content | trim }}<|eot|>{% endfor %}"
ENDED = {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>"}


def specials(names=SPECIALS):
    return byte_level([(name, True) for name in names])


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, {"eos_token_id": 258}, (258, 260)),
        (None, {"eos_token_id": [258, 257]}, (258, 257, 260)),
        ({"eos_token_id": None}, {"eos_token_id": [258]}, (258, 260)),
        ({"eos_token_id": []}, {"eos_token_id": 258}, (258, 260)),
        ({"eos_token_id": 256}, {"eos_token_id": 258}, (256, 260)),  # generation_config.json has the say
        ({"eos_token_id": 260}, {"eos_token_id": 999_999}, (260,)),
        (None, {"vocab_size": 151_936}, (260,)),
    ],
)
def test_the_models_own_stop_ids_count_where_no_generation_config_names_any(tmp_path, generation, model, expected):
    assert load_tokenizer(write_model(tmp_path, specials(), None, generation, model)).stop_ids == expected


def test_the_templates_end_of_turn_is_a_stop_id_wherever_the_template_stands(tmp_path):
    """Llama-3's kind: the end of text is the eos token, and the template ends turns with another."""
    write_model(tmp_path, specials(SPECIALS[:-1]), ENDED, {"eos_token_id": 256})
    assert load_tokenizer(tmp_path).stop_ids == (256,)
    named = [{"name": "tool_use", "template": "{{ messages[1].content }}<|header|>"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, named):
        write_model(tmp_path, specials(SPECIALS[:-1]), ENDED | {"chat_template": template}, {"eos_token_id": 256})
        assert load_tokenizer(tmp_path).stop_ids == (256, 259)
    other = TEMPLATE.replace("<|eot|>", "{{ eos_token }}")
    write_model(tmp_path, specials(SPECIALS[:-1]), ENDED | {"chat_template": other}, {"eos_token_id": 259})
    assert load_tokenizer(tmp_path).stop_ids == (259, 256)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("<|eot|>", "<|header|>"))  # the file is the one that counts
    assert load_tokenizer(tmp_path).stop_ids == (259, 256, 258)


@pytest.mark.parametrize(
    "template",
    ["{% if", "{{ raise_exception('roles') }}", "{{ messages[1].content }}", 7, [{"name": "rag", "template": TEMPLATE}], "\ud800"],
)
def test_a_template_that_cannot_be_rendered_adds_no_stop_id(tmp_path, template):
    write_model(tmp_path, specials(), ENDED | {"chat_template": template})
    assert load_tokenizer(tmp_path).stop_ids == (256, 260)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages[1].content }}")
    assert load_tokenizer(tmp_path).stop_ids == (256, 260)


def test_a_token_that_is_not_special_does_not_end_a_turn(tmp_path):
    backend = byte_level([("<|endoftext|>", True), ("<tool_call>", False), ("<|eot|>", True)])
    template = "{{ messages[1].content }}<tool_call></s><|eot|>"
    write_model(tmp_path, backend, {"eos_token": "<|endoftext|>", "chat_template": template})
    assert load_tokenizer(tmp_path).stop_ids == (256, 258)


def read(file):
    return json.loads(file.read_text())


def test_saving_keeps_what_was_loaded(tmp_path):
    config = ENDED | {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|begin|>", "model_max_length": 131072,
        "chat_template": "in the file", "added_tokens_decoder": {"256": {"content": "<|endoftext|>", "special": True}},
    }  # fmt: skip
    generation = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [258], "pad_token_id": 260, "transformers_version": "4.51.0"}
    model, first, second = (tmp_path / name for name in ("model", "first", "second"))
    (model / "additional_chat_templates").mkdir(parents=True)
    write_model(model, specials(), config, generation, {"eos_token_id": 0})
    files = {
        "chat_template.jinja": TEMPLATE.replace("\n", "\r\n").encode() + b"{# \xc3\xa9 #}\n",
        "additional_chat_templates/rag.jinja": b"{{ documents }}",
        "special_tokens_map.json": b'{"eos_token":  "<|endoftext|>"}',
        "added_tokens.json": b'{"<|endoftext|>": 256}',
    }
    for name, data in files.items():
        (model / name).write_bytes(data)
    tokenizer = load_tokenizer(model)
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((258, 256, 259, 260), 257)
    tokenizer.save(first)
    load_tokenizer(first).save(second)
    for saved in (first, second):
        again = load_tokenizer(saved)
        assert (again.stop_ids, again.pad_id, again.config) == (tokenizer.stop_ids, tokenizer.pad_id, config)
        assert again.encode([Marker("<|eot|>"), "é 12"]) == tokenizer.encode([Marker("<|eot|>"), "é 12"])
        assert read(saved / "tokenizer_config.json") == config
        assert read(saved / "generation_config.json") == generation | {"eos_token_id": [258, 256, 259, 260]}
        assert {name: (saved / name).read_bytes() for name in files} == files
        assert {path.name for path in saved.iterdir()} == {
            "tokenizer.json", "tokenizer_config.json", "generation_config.json", "additional_chat_templates",
            "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
        }  # fmt: skip


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_transformers_renders_a_saved_template_as_the_original(tmp_path, place):
    config = ENDED | {"tokenizer_class": "PreTrainedTokenizerFast"}
    values = {"config": TEMPLATE, "list": [{"name": "default", "template": TEMPLATE}]}
    write_model(tmp_path, specials(), config | ({"chat_template": values[place]} if place in values else {}))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    messages = [{"role": "user", "content": " <b>é "}, {"role": "assistant", "content": "x"}]
    theirs, saved = (transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path, tmp_path / "saved"))
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert text == "<|begin|><|header|>user\n<b>é<|eot|><|header|>assistant\nx<|eot|>"
    assert saved.apply_chat_template(messages, tokenize=False) == text
    assert saved.apply_chat_template(messages)["input_ids"] == theirs.apply_chat_template(messages)["input_ids"]


def test_a_pad_id_is_written_where_none_was_named(tmp_path):
    write_model(tmp_path, specials(), ENDED | {"pad_token": "<|begin|>"}, {"pad_token_id": None, "top_k": 20})
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    assert read(tmp_path / "saved" / "generation_config.json") == {"pad_token_id": 257, "top_k": 20, "eos_token_id": [256, 260]}


def test_pad_may_equal_a_stop_id_or_differ(tmp_path):
    backend = byte_level([("<|endoftext|>", True), ("<|im_end|>", True)])
    assert load_tokenizer(write_model(tmp_path, backend)).pad_id == 257  # nothing named: the first stop id
    write_model(tmp_path, backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, {"eos_token_id": 257})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (256, (257,))
    tokenizer = load_tokenizer(write_model(tmp_path, backend, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}))
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (257, (257,))
    tokenizer = load_tokenizer(write_model(tmp_path, backend, {"pad_token": None}, {"eos_token_id": 257, "pad_token_id": 256}))
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (256, (257,))


def test_markers_become_added_tokens_whether_special_or_not_and_content_does_not(tmp_path):
    backend = byte_level([("<|im_end|>", True), ("<tool_call>", False), ("<｜eos▁｜>", True)])
    tokenizer = load_tokenizer(write_model(tmp_path, backend))
    assert tokenizer.encode([Marker("<tool_call>"), Marker("<｜eos▁｜>")]) == [257, 258]
    assert tokenizer.decode([257, 258]) == "<tool_call><｜eos▁｜>"
    assert max(tokenizer.encode(["<tool_call><｜eos▁｜>"])) < 256


def test_template_ids_equal_those_of_the_rendered_text(tmp_path):
    names = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    backend = byte_level([(name, True) for name in names])
    tokenizer = load_tokenizer(write_model(tmp_path, backend))
    pieces = CHAT_FORMATS["rstar2"].prompt("What is 1+1?", [{"type": "function"}])
    assert tokenizer.encode(pieces) == backend.encode("".join(pieces), add_special_tokens=False).ids


def test_truncation_and_padding_settings_of_the_file_are_not_applied(tmp_path):
    backend = byte_level([("<|im_end|>", True)])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(write_model(tmp_path, backend)).encode(["abcde"])) == 5


def test_a_post_processor_that_adds_tokens_is_not_applied(tmp_path):
    backend = byte_level([("<|im_end|>", True), ("<s>", True)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer = load_tokenizer(write_model(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(["ab"])) == "ab"


def test_what_cannot_be_loaded_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level([("<|im_start|>", True)]))
    with pytest.raises(UserError, match="no stop token"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level([("<|im_end|>", True)]), {"eos_token": "<absent>"})
    with pytest.raises(UserError, match="not in the vocabulary"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level([("<|im_end|>", True)]), {}, {"eos_token_id": 9999})
    with pytest.raises(UserError, match="outside the tokenizer's vocabulary"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level([("<|im_end|>", True)]), {}, {"eos_token_id": ["<|im_end|>"]})
    with pytest.raises(UserError, match=r"eos_token_id in .*generation_config.json must be an id or a list of ids"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level([("<|im_end|>", True)]), {}, {}, {"eos_token_id": True})
    with pytest.raises(UserError, match=r"eos_token_id in .*[^_]config.json must be an id or a list of ids, not True"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match="not valid JSON"):
        load_tokenizer(tmp_path)


def test_the_class_satisfies_the_protocol(toy):
    tokenizer: Tokenizer = toy
    assert tokenizer.stop_ids == (toy.special_tokens["<|im_end|>"],)
    assert tokenizer.pad_id == toy.special_tokens["<|pad|>"]
