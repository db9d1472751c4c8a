"""Text to token ids and back, on the `tokenizers` library.

The rule that matters here: *content never becomes a special token*. A tool may print `<|im_start|>assistant`, a question may
quote `<tool_call>`; they are text. So there are two backends: the full one knows the special tokens and decodes; a second one,
with every added token taken out, encodes content. Only a `Marker` piece becomes a special id.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from rstar_jax.text.chat import COMPACT_SPECIALS, PAD, TURN_END
from rstar_jax.text.template import default_template, end_of_turn
from rstar_jax.types import Marker, UserError

_BYTES = 256
_REPLACEMENT = "\ufffd"
_TEMPLATE = "chat_template.jinja"
_KEPT = (_TEMPLATE, "additional_chat_templates/*.jinja", "special_tokens_map.json", "added_tokens.json")


def _without_added_tokens(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy of `full` that can only encode content: no added tokens, and none of them in the vocabulary."""
    description = json.loads(full.to_str())
    added = {token["content"] for token in description["added_tokens"]}
    description["added_tokens"] = []
    description["post_processor"] = None  # it may name special tokens
    model = description["model"]
    if isinstance(model.get("vocab"), dict):
        merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        used = {part for merge in merges for part in merge} | {"".join(merge) for merge in merges} | {model.get("unk_token")}
        model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in added or token in used}
    return tokenizers.Tokenizer.from_str(json.dumps(description))


@dataclasses.dataclass(frozen=True)
class FastTokenizer:
    """A `Tokenizer` over one `tokenizers` backend. Made by `load_tokenizer` and `train_tokenizer`.

    `config` is the content of tokenizer_config.json and `generation` that of generation_config.json; `files` are further files of
    the model directory, by relative path. `save` writes all of them back. `pad_id` may equal a stop id: what is padding is known
    from lengths, never from ids.
    """

    backend: tokenizers.Tokenizer
    stop_ids: tuple[int, ...]
    pad_id: int
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    _content: tokenizers.Tokenizer = dataclasses.field(init=False, repr=False)
    _special: Mapping[str, int] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        content = _without_added_tokens(self.backend)
        for index, token in added.items():
            if token.special and index in content.encode(token.content, add_special_tokens=False).ids:
                raise UserError(f"the tokenizer gives plain text {token.content!r} its special id {index}; they must differ")
        object.__setattr__(self, "_content", content)
        object.__setattr__(self, "_special", {token.content: index for index, token in added.items()})
        if not self.stop_ids:
            raise UserError(f"the tokenizer has no stop token: set eos_token in tokenizer_config.json or add {TURN_END}")
        size = self.vocab_size
        for index in (*self.stop_ids, self.pad_id):
            if not 0 <= index < size:
                raise UserError(f"stop or pad id {index} is outside the tokenizer's vocabulary of {size}")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that exists (ids may have holes)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The id of every added token, by its text."""
        return self._special

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Ids of `pieces`: a `Marker` that is an added token gives its id; all between two such ids is encoded as one text.
        Lone surrogates, which no UTF-8 text can hold, become U+FFFD."""
        ids: list[int] = []
        pending: list[str] = []
        for piece in pieces:
            if isinstance(piece, Marker) and piece in self._special:
                ids += self._encode_content("".join(pending))
                pending = []
                ids.append(self._special[piece])
            else:
                pending.append(piece)
        return ids + self._encode_content("".join(pending))

    def _encode_content(self, text: str) -> list[int]:
        if not text:
            return []
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._content.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included and spaces untouched; bytes that are not UTF-8, and ids that no token has
        (a model's table may be larger than its vocabulary), become U+FFFD."""
        parts: list[str] = []
        run: list[int] = []
        for index in map(int, ids):
            if index >= 0 and self.backend.id_to_token(index) is not None:
                run.append(index)
                continue
            parts += [self.backend.decode(run, skip_special_tokens=False), _REPLACEMENT]
            run = []
        return "".join([*parts, self.backend.decode(run, skip_special_tokens=False)])

    def save(self, directory: str | pathlib.Path) -> None:
        """Write a directory that `load_tokenizer` reads as this tokenizer again and transformers' `AutoTokenizer` loads.

        tokenizer_config.json, the chat template and the other `files` are written as they were; generation_config.json keeps its
        fields but `eos_token_id`, which becomes the list of all stop ids. A `pad_token_id` is added where it has none.
        """
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(path / "tokenizer.json"))
        generation = {**self.generation, "eos_token_id": list(self.stop_ids)}
        if generation.get("pad_token_id") is None:
            generation["pad_token_id"] = self.pad_id
        for name, content in (("tokenizer_config.json", dict(self.config)), ("generation_config.json", generation)):
            (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, data in self.files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)


def train_tokenizer(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = COMPACT_SPECIALS) -> FastTokenizer:
    """Train a byte-level BPE of exactly `vocab_size` ids: `specials` first, then the 256 bytes, then merges.

    Every digit is a token of its own; any text round-trips. The texts may hold special tokens, which are left out of the
    counts. When the texts give too few merges, unused special tokens fill the vocabulary, so that it always equals the
    model's table. The same texts give the same vocabulary. `<|im_end|>` must be among the specials (the stop token);
    `<|pad|>` is used for padding where it is one of them, else the stop token.
    """
    least = len(specials) + _BYTES
    if vocab_size < least:
        raise UserError(f"a vocabulary of {vocab_size} is too small: {len(specials)} specials and 256 bytes need {least}")
    if TURN_END not in specials or len(set(specials)) != len(specials) or not all(specials):
        raise UserError(f"specials must be distinct, not empty, and hold {TURN_END}; got {', '.join(specials)}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(str(token), special=True, normalized=False) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    at_specials = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
    backend.train_from_iterator((part for text in texts for part in at_specials.split(text)), trainer)
    fill = [f"<|unused_{i}|>" for i in range(vocab_size - backend.get_vocab_size())]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in fill])
    pad = PAD if PAD in specials else TURN_END
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": str(TURN_END),
        "pad_token": str(pad),
        "clean_up_tokenization_spaces": False,
    }
    vocabulary = backend.get_vocab()
    return FastTokenizer(backend, (vocabulary[TURN_END],), vocabulary[pad], config)


def load_tokenizer(directory: str | pathlib.Path) -> FastTokenizer:
    """The tokenizer of a Hugging Face model directory.

    Stop ids are the union, in this order, of `eos_token_id` (an id or a list) in generation_config.json, or in config.json if it
    is not there; `eos_token` in tokenizer_config.json, else in special_tokens_map.json; the special token that the chat template
    writes behind an assistant's message; and `<|im_end|>`. Any of them may be absent, but not all. Padding is `pad_token`, found
    likewise, else `pad_token_id` in generation_config.json, else the first stop id. Raises `UserError` for a missing directory or
    file and for broken JSON.
    """
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; a tokenizer is loaded from a directory that holds tokenizer.json")
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{path} holds no tokenizer.json; save the model's fast tokenizer there")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} cannot be read as a tokenizer: {' '.join(str(error).split())}") from error
    config, generation = _json_file(path / "tokenizer_config.json"), _json_file(path / "generation_config.json")
    tokens = _json_file(path / "special_tokens_map.json") | {key: token for key, token in config.items() if token is not None}
    files = {str(kept.relative_to(path)): kept.read_bytes() for name in _KEPT for kept in sorted(path.glob(name))}
    found = [
        *(_eos_ids(path / "generation_config.json") or _eos_ids(path / "config.json")),
        _token_id(backend, tokens, "eos_token"),
        _template_end(backend, tokens, files),
        backend.token_to_id(TURN_END),
    ]
    stop_ids = tuple(dict.fromkeys(index for index in found if index is not None))
    pads = [_token_id(backend, tokens, "pad_token"), generation.get("pad_token_id"), *stop_ids]
    pad_id = next((int(index) for index in pads if index is not None), 0)
    return FastTokenizer(backend, stop_ids, pad_id, config, generation, files)


def _eos_ids(file: pathlib.Path) -> list[int]:
    """What `eos_token_id` in a JSON file says: one id, a list of them, or nothing."""
    value = _json_file(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int for index in ids):
        raise UserError(f"eos_token_id in {file} must be an id or a list of ids, not {value!r}")
    return ids


def _template_end(backend: tokenizers.Tokenizer, config: Mapping[str, Any], files: Mapping[str, bytes]) -> int | None:
    """The id of the special token that ends an assistant's turn in the chat template: in its file, else in `config`."""
    template = files[_TEMPLATE].decode("utf-8", "replace") if _TEMPLATE in files else default_template(config)
    special = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    token = None if template is None else end_of_turn(template, list(special), config)
    return None if token is None else special[token]


def _json_file(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object")
    return content


def _token_id(backend: tokenizers.Tokenizer, tokens: Mapping[str, Any], key: str) -> int | None:
    """The id of the token that `tokens` names as `key`, as text or as an object with `content`."""
    token = tokens.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    index = backend.token_to_id(token)
    if index is None:
        raise UserError(f"the tokenizer's files name {key} {token!r}, which is not in the vocabulary")
    return index
