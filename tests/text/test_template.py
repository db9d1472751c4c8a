"""Chat templates of others: rendered as transformers does, and how a turn ends."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rstar_jax.text.template import default_template, end_of_turn, render

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set date = strftime_now("%Y") if strftime_now is defined else "1999" %}
{%- if tools is not none %}
    {{- "no tools here" }}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear " + date | length | string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
"""
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""
HARMONY = """{%- for message in messages %}
    {%- if message.role == "user" %}<|start|>user<|message|>{{ message.content }}<|end|>
    {%- elif loop.last %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
    {%- else %}<|start|>assistant<|message|>{{ message.content }}<|end|>
    {%- endif %}
{%- endfor %}"""
GENERATION = """{% for m in messages %}
    {% if m.role == 'assistant' %}
{% generation %}<a>{{ m.content }}<|im_end|>{% endgeneration %}
    {% else %}
<u>{{ m | tojson }}
        {% continue %}
    {% endif %}
{% endfor %}"""
TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|e", "<|"]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "model_max_length": 5}
MESSAGES = [{"role": "user", "content": "<b>é\n"}, {"role": "assistant", "content": "{{ 1 }} </s>"}]
ALL = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "harmony": HARMONY, "generation": GENERATION}


@pytest.mark.parametrize("name", ALL)
def test_the_text_is_the_one_that_transformers_renders(name):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = render_jinja_template(conversations=[MESSAGES], chat_template=ALL[name], **variables)
    assert render(ALL[name], MESSAGES, **variables) == theirs
    assert len(theirs) > 30


@pytest.mark.parametrize(
    ("name", "token"),
    [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>"), ("harmony", "<|return|>"), ("generation", "<|im_end|>")],
)
def test_the_token_that_ends_an_assistants_turn(name, token):
    assert end_of_turn(ALL[name], TOKENS, CONFIG) == token


@pytest.mark.parametrize(
    "template",
    [
        "", "no messages", "{% for", "{{ nothing.at.all }}", "{{ raise_exception('no') }}", "{{ messages[9].content }}", "{{ 1 / 0 }}",
        "{{ messages[1].content }} and no token", "{{ messages[1].content | upper }}<|im_end|>", "<|im_end|>{{ messages[1].content }}",
        "{% for part in messages[1].content %}{{ part.text }}{% endfor %}<|im_end|>",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[1].content }}<|im_end|>",
        "{% for i in range(10 ** 9) %}x{% endfor %}{{ messages[1].content }}<|im_end|>",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_a_template_that_says_nothing_of_it_or_cannot_be_rendered_gives_none(template):
    assert end_of_turn(template, TOKENS, CONFIG) is None


def test_only_the_given_tokens_count_and_the_longest_at_a_place():
    assert end_of_turn("{{ messages[1].content }}\n<|end|>", [], CONFIG) is None
    assert end_of_turn("{{ messages[1].content }}\n<|end|>", ["", "<|", "<|end|>", "<|e"], CONFIG) == "<|end|>"


def test_an_absent_token_is_empty_and_not_the_word_none():
    assert render("[{{ bos_token }}]", MESSAGES) == "[]"
    assert end_of_turn("{{ messages[1].content + pad_token }}</s>", TOKENS, CONFIG) is None  # undefined: cannot be added
    assert end_of_turn("{{ messages[1].content }}{{ pad_token }}</s>", TOKENS, CONFIG) == "</s>"


@pytest.mark.parametrize(
    ("value", "template"),
    [
        (None, None), ("T", "T"), (3, None), ([], None), ([{"name": "tool_use", "template": "U"}], None), (["x"], None),
        ([{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}], "D"), ([{"name": "default"}], None),
    ],
)  # fmt: skip
def test_of_several_templates_the_default_counts(value, template):
    assert default_template({"chat_template": value}) == template
