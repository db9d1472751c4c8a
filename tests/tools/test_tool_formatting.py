"""The text that the model sees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.tools.formatting import format_result, truncate_text
from rstar_jax.types import ToolResult, ToolStatus

NAME_ERROR = "Traceback (most recent call last):\n  File \"<code>\", line 2, in <module>\n    y\nNameError: name 'y' is not defined\n"
SYNTAX_ERROR = '  File "<code>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
REPEATED = (
    'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f()\n  File "<code>", line 2, in f\n'
    "    return f()\n           ^^^\n  [Previous line repeated 996 more times]\nRecursionError: too deep\n"
)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(ToolStatus.OK, "4\n"), "Tool call success\nstdout: 4\n"),
        (ToolResult(ToolStatus.OK), "Tool call success"),
        (ToolResult(ToolStatus.OK, "4\n", "warned\n"), "Tool call success\nstdout: 4\n\nstderr: warned\n"),
        (
            ToolResult(ToolStatus.ERROR, "", NAME_ERROR),
            "Tool call failure\nreason: \nstderr: NameError at line 2: name 'y' is not defined\n  y\n",
        ),
        (
            ToolResult(ToolStatus.ERROR, "a\n", "mine\n" + NAME_ERROR),
            "Tool call failure\nreason: \nstdout: a\n\nstderr: mine\nNameError at line 2: name 'y' is not defined\n  y\n",
        ),
        (
            ToolResult(ToolStatus.ERROR, "", SYNTAX_ERROR),
            "Tool call failure\nreason: \nstderr: SyntaxError at line 1: invalid syntax (<unknown>, line 1)\n  def f(:\n",
        ),
        (
            ToolResult(ToolStatus.ERROR, "", REPEATED),
            "Tool call failure\nreason: \nstderr: RecursionError at line 2: too deep\n  return f()\n",
        ),
        (ToolResult(ToolStatus.ERROR, "", "no traceback"), "Tool call failure\nreason: \nstderr: no traceback"),
        (
            ToolResult(ToolStatus.TIMEOUT, "so far\n", "", None, -9),
            "Tool call failure\nreason: worker_timeout\nstdout: so far\n",
        ),
        (ToolResult(ToolStatus.CPU_LIMIT), "Tool call failure\nreason: worker_timeout"),
        (ToolResult(ToolStatus.EXIT, "", "", None, 3), "Tool call failure\nreason: exit code 3"),
        (ToolResult(ToolStatus.SIGNAL, "", "", None, -11), "Tool call failure\nreason: killed by SIGSEGV"),
        (ToolResult(ToolStatus.SIGNAL, "", "", None, -40), "Tool call failure\nreason: killed by signal 40"),
        (ToolResult(ToolStatus.OUTPUT_LIMIT), "Tool call failure\nreason: output_limit"),
        (
            ToolResult(ToolStatus.REJECTED, stderr="argument 'code' is missing"),
            "Tool call failure\nreason: invalid_input\nstderr: argument 'code' is missing",
        ),
    ],
)
def test_rstar2_text(result, text):
    assert format_result(result, style="rstar2") == text


def test_rstar2_text_with_its_execution_time():
    result = ToolResult(ToolStatus.OK, "4\n", seconds=0.0249)
    assert format_result(result, style="rstar2", show_time=True) == "Tool call success\nstdout: 4\n\nexecution time: 0.02s"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(ToolStatus.OK, "4\n"), "4"),
        (ToolResult(ToolStatus.OK, "4\n", "a warning\n"), "4"),
        (ToolResult(ToolStatus.OK), "(no output)"),
        (ToolResult(ToolStatus.ERROR, "", NAME_ERROR), "NameError: name 'y' is not defined"),
        (ToolResult(ToolStatus.ERROR, "a\nb\n", NAME_ERROR), "a\nb\nNameError: name 'y' is not defined"),
        (ToolResult(ToolStatus.ERROR, "", SYNTAX_ERROR), "SyntaxError: invalid syntax"),
        (ToolResult(ToolStatus.ERROR, "", NAME_ERROR[:-1] + "\nsecond line\n"), "NameError: name 'y' is not defined"),
        (ToolResult(ToolStatus.TIMEOUT, "a\n"), "a\nTimeoutError: the program did not end within the time limit"),
        (ToolResult(ToolStatus.MEMORY), "MemoryError: the program used more memory than it may"),
        (ToolResult(ToolStatus.EXIT, "", "", None, 3), "SystemExit: 3"),
        (ToolResult(ToolStatus.EXIT, "", "bye\n", None, 1), "bye"),
        (ToolResult(ToolStatus.SIGNAL, "", "", None, -9), "Error: the program was killed by SIGKILL"),
        (ToolResult(ToolStatus.REJECTED, stderr="argument 'code' is missing"), "argument 'code' is missing"),
    ],
)
def test_plain_text(result, text):
    assert format_result(result, style="plain") == text


@pytest.mark.parametrize("style", ["rstar2", "plain"])
def test_every_status_but_our_own_failure_has_a_text_without_a_clock_reading(style):
    for status in ToolStatus:
        first, second = (ToolResult(status, exit_code=-9, seconds=s, cpu_seconds=s) for s in (1.2345, 6.789))
        if status is ToolStatus.INFRA_ERROR:
            with pytest.raises(ValueError, match="infrastructure"):
                format_result(first, style=style)
        else:
            assert format_result(first, style=style) == format_result(second, style=style) != ""


@pytest.mark.parametrize("arguments", [{"style": "fancy"}, {"style": "plain", "show_time": True}])
def test_an_unknown_style_is_refused(arguments):
    with pytest.raises(ValueError, match="style"):
        format_result(ToolResult(ToolStatus.OK), **arguments)


# --- truncation: three byte-level tokenizers -------------------------------------------------------------------------


def byte_encode(text):
    return list(text.encode("utf-8", "surrogatepass"))


def byte_decode(ids):
    return bytes(ids).decode("utf-8", "replace")


MERGES = ["...", "trunc", "ated", "ab", "aba", " the", "漢字", "\n\n"]


def merging_encode(text):
    """Greedy merges over bytes: an id of 256 or more stands for several bytes, so re-encoding a cut can change the count."""
    data, ids = text.encode("utf-8", "surrogatepass"), []
    while data:
        best = max((m for m in MERGES if data.startswith(m.encode())), key=len, default=None)
        ids.append(data[0] if best is None else 256 + MERGES.index(best))
        data = data[1 if best is None else len(best.encode()) :]
    return ids


def merging_decode(ids):
    return b"".join(bytes([i]) if i < 256 else MERGES[i - 256].encode() for i in ids).decode("utf-8", "replace")


TOKENIZERS = [(byte_encode, byte_decode), (merging_encode, merging_decode)]


def test_left_keeps_the_tail_and_says_that_it_cut():
    text = "x" * 80 + "\nthe answer is 1938\n"  # verl#6313
    assert len(text) == 100
    shown = truncate_text(text, 32, encode=byte_encode, decode=byte_decode, side="left")
    assert shown == "...(truncated)..." + "answer is 1938\n"
    assert len(byte_encode(shown)) == 32


def test_right_keeps_the_head_and_middle_both_ends():
    text = "".join(chr(97 + i % 26) for i in range(100))
    right = truncate_text(text, 40, encode=byte_encode, decode=byte_decode, side="right")
    assert right == text[:23] + "...(truncated)..."
    middle = truncate_text(text, 40, encode=byte_encode, decode=byte_decode, side="middle")
    assert middle == text[:12] + "...(truncated)..." + text[-11:]


@pytest.mark.parametrize("char", ["漢", "🎉"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_the_limit_counts_tokens_not_characters(char, side):
    shown = truncate_text(char * 1000, 256, encode=byte_encode, decode=byte_decode, side=side)  # verl#4918
    size = len(char.encode())
    kept = shown.count(char)
    assert "truncated" in shown and "\ufffd" not in shown
    assert 256 - 17 - 3 * size < kept * size <= 256 - 17
    assert len(byte_encode(shown)) <= 256


def test_text_within_the_limit_is_untouched():
    text = "漢" * 10
    assert truncate_text(text, 30, encode=byte_encode, decode=byte_decode) == text


def test_a_tiny_limit_shrinks_the_notice_before_the_text_is_lost():
    shown = truncate_text("0123456789", 6, encode=byte_encode, decode=byte_decode, side="left")
    assert shown == "...789"
    assert truncate_text("0123456789", 2, encode=byte_encode, decode=byte_decode, side="right") == "01"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab .()\n漢字🎉é\ufffdtruncated"), max_size=120),
    limit=st.integers(1, 60),
    side=st.sampled_from(["left", "right", "middle"]),
    tokenizer=st.sampled_from(TOKENIZERS),
)
def test_the_limit_holds_for_every_text_side_and_tokenizer(text, limit, side, tokenizer):
    encode, decode = tokenizer
    shown = truncate_text(text, limit, encode=encode, decode=decode, side=side)
    assert len(encode(shown)) <= limit
    if len(encode(text)) <= limit:
        assert shown == text
    elif side == "left":
        assert text.endswith((shown.removeprefix("...(truncated)...").removeprefix("..."), shown))
    elif side == "right":
        assert text.startswith((shown.removesuffix("...(truncated)...").removesuffix("..."), shown))


@pytest.mark.parametrize(("limit", "side"), [(0, "left"), (5, "top")])
def test_impossible_requests_are_refused(limit, side):
    with pytest.raises(ValueError, match=r"limit_tokens|side"):
        truncate_text("abcdefghij", limit, encode=byte_encode, decode=byte_decode, side=side)
