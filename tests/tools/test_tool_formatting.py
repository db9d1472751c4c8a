"""The text that the model sees."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rstar_jax.tools.formatting import STYLES, clean_text, format_result, truncate_text
from rstar_jax.types import ToolResult, ToolStatus

NAME_ERROR = "Traceback (most recent call last):\n  File \"<code>\", line 2, in <module>\n    y\nNameError: name 'y' is not defined\n"
SYNTAX_ERROR = '  File "<code>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
MEMORY_ERROR = 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    x = [0] * 10**12\nMemoryError\n'
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
def test_last_line_text(result, text):
    assert format_result(result, style="last_line") == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(ToolStatus.OK, "4\n"), "4"),
        (ToolResult(ToolStatus.OK, "a\n4", "a warning\n"), "a\n4\na warning"),
        (ToolResult(ToolStatus.OK), "(no output)"),
        (ToolResult(ToolStatus.OK, "\n"), "(no output)"),
        (ToolResult(ToolStatus.ERROR, "a\n", "mine\n" + NAME_ERROR), "a\nmine\n" + NAME_ERROR[:-1]),
        (ToolResult(ToolStatus.ERROR, "", SYNTAX_ERROR), SYNTAX_ERROR[:-1]),
        (ToolResult(ToolStatus.ERROR, "", REPEATED), REPEATED[:-1].replace("           ^^^\n", "")),
        (ToolResult(ToolStatus.ERROR, "a\n"), "a\nError: the program failed"),
        (ToolResult(ToolStatus.TIMEOUT, "a\n", "b\n"), "a\nb\nTimeoutError: the program did not end within the time limit"),
        (ToolResult(ToolStatus.CPU_LIMIT), "TimeoutError: the program used more processor time than it may"),
        (ToolResult(ToolStatus.MEMORY), "MemoryError: the program used more memory than it may"),
        (ToolResult(ToolStatus.MEMORY, "", MEMORY_ERROR), MEMORY_ERROR[:-1]),
        (ToolResult(ToolStatus.OUTPUT_LIMIT, "a\n"), "a\nOutputLimitError: the program printed more than it may"),
        (ToolResult(ToolStatus.EXIT, "a\n", "", None, 3), "a\nSystemExit: 3"),
        (ToolResult(ToolStatus.EXIT, "", "bye\n", None, 1), "bye\nSystemExit: 1"),
        (ToolResult(ToolStatus.SIGNAL, "", "", None, -9), "Error: the program was killed by SIGKILL"),
        (ToolResult(ToolStatus.REJECTED, stderr="argument 'code' is missing"), "argument 'code' is missing"),
        (ToolResult(ToolStatus.REJECTED), "Error: the call was malformed"),
    ],
)
def test_jupyter_text(result, text):
    assert format_result(result, style="jupyter") == text


@pytest.mark.parametrize("style", STYLES)
def test_every_status_but_our_own_failure_has_a_text_without_a_clock_reading(style):
    for status in ToolStatus:
        first, second = (ToolResult(status, exit_code=-9, seconds=s, cpu_seconds=s) for s in (1.2345, 6.789))
        if status is ToolStatus.INFRA_ERROR:
            with pytest.raises(ValueError, match="infrastructure"):
                format_result(first, style=style)
        else:
            assert format_result(first, style=style) == format_result(second, style=style) != ""


@pytest.mark.parametrize(
    "arguments",
    [{"style": "fancy"}, {"style": "plain"}, {"style": "last_line", "show_time": True}, {"style": "jupyter", "show_time": True}],
)
def test_an_unknown_style_is_refused(arguments):
    with pytest.raises(ValueError, match="style"):
        format_result(ToolResult(ToolStatus.OK), **arguments)


# --- what a terminal shows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m and \x1b[1;38;5;196mbold\x1b[m\n", "red and bold\n"),
        ("\x1b[2J\x1b[Htop\x1b[?25l", "top"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;https://a.b/c\x1b\\link\x1b]8;;\x1b\\!", "link!"),
        ("\x1bPsixel data\x1b\\.", "."),
        ("\x1b(B\x1b7ok\x1b=", "ok"),
        ("\x1b]0;never ends\nnext line", "\nnext line"),
        ("cut \x1b[38;5", "cut "),
        ("cut \x1b", "cut "),
        ("\x1b[\x1b[\x1b[1mx", "x"),
        ("one\r\ntwo\r\r\nthree", "one\ntwo\nthree"),
        ("kept  \r\n", "kept  \n"),
        ("\r  0%|    |\r 50%|==  |\r100%|====|\ndone\n", "100%|====|\ndone\n"),
        ("abcdef\rXY", "XYcdef"),
        ("abc\r", "abc"),
        ("working...\rdone      \n", "done\n"),
        ("a long line\r\x1b[Kshort", "short"),
        ("a long line\x1b[2K\rshort", "short"),
        ("\r\x1b[2K\x1b[32m#\x1b[0m 1/2\r\x1b[2K\x1b[32m##\x1b[0m 2/2\n", "## 2/2\n"),
        ("10%\b\b\b20%", "20%"),
        ("_\bu_\bn", "un"),
        ("abc\b \b", "ab"),
        ("\b\bx", "x"),
        ("漢字\r例", "例字"),
        ("bell\x07, nul\0, del\x7f", "bell, nul, del"),
        ("page\x0cbreak\x0bdown", "page\nbreak\ndown"),
        ("tabs\tand\n\nlines \n", "tabs\tand\n\nlines \n"),
        ("\ud800 é 🎉 \u2028 \ufffd", "\ud800 é 🎉 \u2028 \ufffd"),
    ],
)
def test_text_is_shown_as_a_terminal_shows_it(text, shown):
    assert clean_text(text) == shown


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
TERMINAL_PIECES = [
    "\x1b", "\x1b[", "\x9b", "\x1b]", "\x1bP", "\x1b\\", "\x07", "\x9c", "[", "0", "2", ";", "?", " ", "m", "K", "H", "\\",
    "\r", "\n", "\r\n", "\b", "\t", "\v", "\f", "\0", "\x7f", "\x85", "a", "漢", "\ud800", "50%",
]  # fmt: skip
TERMINAL_TEXT = st.lists(st.sampled_from(TERMINAL_PIECES) | st.characters()).map("".join)


@settings(max_examples=500, deadline=None)
@given(TERMINAL_TEXT)
@example("\x1b\x1b[[31m")
@example("\x1b[\x1b]m")
def test_cleaned_text_is_clean_and_stays_as_it_is(text):
    shown = clean_text(text)
    assert not CONTROL.search(shown)
    assert clean_text(shown) == shown
    assert len(shown) <= len(text)
    assert clean_text(shown + "\n" + text) == shown + "\n" + shown  # a line knows nothing of the others


@given(st.text(st.characters(exclude_categories=("Cc",), include_characters="\t\n")))
def test_text_without_control_characters_is_unchanged(text):
    assert clean_text(text) == text


@given(st.lists(st.tuples(st.sampled_from(["", "\x1b[1;31m", "\x1b[0m", "\x1b]0;t\x07", "\x1b(B"]), st.text("ab \n漢"))))
def test_colours_take_nothing_with_them(parts):
    assert clean_text("".join(escape + text for escape, text in parts)) == "".join(text for _, text in parts)


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[" * 1_000_000,
        "\x1b[" + "0;" * 1_000_000,
        "\x1b]" * 1_000_000,
        "\x1b]" + "x" * 2_000_000,
        "\x1b" + " " * 2_000_000,
        "\r" * 2_000_000,
        "\r" * 2_000_000 + "x",
        "\b" * 2_000_000,
        "x" * 1_000_000 + "\b" * 1_000_000,
        "x" * 1_000_000 + "\ry" * 500_000,
        "x" * 1_000_000 + "\r\x1b[K" * 250_000,
        "x\x1b[2K" * 400_000,
        "xy\b\x1b[K" * 300_000,
        "\r\n" * 1_000_000,
        "\x1b\n" * 1_000_000,
        " \r" * 1_000_000,
    ],
    ids=lambda text: repr(text[:6]) + "..." + repr(text[-6:]),
)
def test_time_is_linear_on_hostile_text(text):
    start = time.perf_counter()
    clean_text(text)
    assert time.perf_counter() - start < 10  # a second or less; quadratic time would take hours


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("rstar2", "Tool call failure\nreason: \nstdout: 100%\n\nstderr: ValueError at line 1: bad\n  f()\n"),
        ("jupyter", '100%\nTraceback (most recent call last):\n  File "<code>", line 1, in <module>\n    f()\nValueError: bad'),
        ("last_line", "100%\nValueError: bad"),
    ],
)
def test_every_style_shows_clean_text_and_leaves_the_result_alone(style, text):
    stderr = 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    f()\nValueError: \x1b[31mbad\x1b[0m\n'
    result = ToolResult(ToolStatus.ERROR, " 50%\r100%\r\n", stderr)
    assert format_result(result, style=style) == text
    assert (result.stdout, result.stderr) == (" 50%\r100%\r\n", stderr)


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
