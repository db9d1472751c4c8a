"""The chat template of a Hugging Face model directory, rendered as transformers renders it. Only one thing is read from it: the
token that ends an assistant's turn. Prompts come from `text.chat`."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_ANSWER = "AnswerOfTheAssistant"  # what no template writes by itself
_DIALOGUE = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER})


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the assistant writes, and changes nothing of it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # jinja's own escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation. Raises whatever the template raises: it is another's program, in a sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    fixed = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": False}
    return environment.from_string(template).render(fixed | variables)


def default_template(config: Mapping[str, Any]) -> str | None:
    """The template in tokenizer_config.json: a text, or the one called `default` in a list of names and templates."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def end_of_turn(template: str, special_tokens: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """The first of `special_tokens` behind the assistant's message in a question and its answer; None where the template writes
    none, or cannot render the two. `config` (tokenizer_config.json) gives `bos_token`, `eos_token` and the like."""
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items() if key.endswith("_token")}
    try:
        text = render(template, _DIALOGUE, **{key: value for key, value in named.items() if isinstance(value, str)})
    except Exception:  # it may fail in any way that a program can
        return None
    behind = text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
    either = "|".join(map(re.escape, sorted(filter(None, special_tokens), key=len, reverse=True)))
    found = re.search(either, behind) if either else None
    return found.group() if found else None
