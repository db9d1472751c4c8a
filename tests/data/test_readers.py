import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from rstar_jax.data.readers import SkippedRow, find_dataset, last_boxed, read_problems
from rstar_jax.types import UserError


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def answers(path):
    return [problem.answer for problem in read_problems(path).problems]


@pytest.mark.parametrize(
    ("final", "answer"),
    [
        ("18", "18"),
        ("1,234", "1234"),
        ("1,234,567", "1234567"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("$70,000", "70000"),
        ("3.50", "3.50"),
        ("27.0", "27"),
        ("0.25", "0.25"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("  42  ", "42"),
        ("42.", "42"),
        ("1,23", "1,23"),  # not a grouped number
        ("x + 1", "x + 1"),
    ],
)
def test_the_number_after_the_marks_of_gsm8k_is_the_answer(tmp_path, final, answer):
    path = write(tmp_path / "a.jsonl", {"question": "How many?", "answer": f"She has <<4*5=20>>20.\n#### {final}"})
    assert answers(path) == [answer]


def test_the_last_marked_answer_counts_and_marks_inside_a_line_do_not(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "q", "answer": "#### 1\nmark #### 2\n#### 3"})
    assert answers(path) == ["3"]


def test_socratic_rows_keep_their_steps_in_the_metadata(tmp_path):
    text = "How many eggs? ** She has 9 eggs.\nHow much? ** 9*2 = 18.\n#### 18"
    (problem,) = read_problems(write(tmp_path / "soc.jsonl", {"question": "Eggs?", "answer": text})).problems
    assert (problem.answer, problem.id, problem.family) == ("18", "soc:1", "soc")
    assert problem.metadata["answer"] == text


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("204", "204"),
        (27, "27"),
        (27.0, "27"),
        (-0.0, "0"),
        (2.5, "2.5"),
        (1e-7, "0.0000001"),
        (1e20, "1" + 20 * "0"),
        (["8"], "8"),
    ],
)
def test_answers_of_any_scalar_type_become_text(tmp_path, value, answer):
    assert answers(write(tmp_path / "a.jsonl", {"problem": "p", "answer": value})) == [answer]


def test_latex_answers_stay_as_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": r"\left( 3, \frac{\pi}{2} \right)"})
    assert answers(path) == [r"\left( 3, \frac{\pi}{2} \right)"]


@pytest.mark.parametrize("row", [{}, {"answer": ""}, {"answer": None}])
def test_without_an_answer_the_last_box_of_the_solution_is_it(tmp_path, row):
    row = {"problem": "p", "solution": r"first \boxed{1}, then \boxed{\frac{1}{2}} cm", **row}
    assert answers(write(tmp_path / "a.jsonl", row)) == [r"\frac{1}{2}"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{70} and \boxed{71}", "71"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{}", None),
        (r"\boxed", None),
        ("\\boxed{\\", None),
        ("no box", None),
    ],
)
def test_last_boxed_is_the_last_one_whose_braces_balance(text, content):
    assert last_boxed(text) == content


VERL = {
    "data_source": "rstar_dapo",
    "agent_name": "rstar2_agent",
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7, "need_tools_kwargs": False},
}


def test_verl_rows_of_parquet_load_with_their_structs(tmp_path):
    (problem,) = read_problems(parquet(tmp_path / "v.parquet", [VERL])).problems
    assert (problem.question, problem.answer, problem.family, problem.id) == ("What is 2 + 2?", "4", "rstar_dapo", "v:1")
    assert problem.metadata["extra_info"]["index"] == 7


def test_verl_rows_whose_structs_are_json_strings_load(tmp_path):
    row = VERL | {"prompt": json.dumps(VERL["prompt"]), "reward_model": json.dumps(VERL["reward_model"])}
    assert answers(parquet(tmp_path / "v.parquet", [row])) == ["4"]
    assert read_problems(write(tmp_path / "v.jsonl", row)).problems[0].question == "What is 2 + 2?"


def test_a_system_message_in_front_of_the_question_is_left_out(tmp_path):
    row = VERL | {"prompt": [{"role": "system", "content": "Be brief."}, *VERL["prompt"]]}
    assert read_problems(write(tmp_path / "v.jsonl", row)).problems[0].question == "What is 2 + 2?"


def test_dapo_rows_with_a_plain_prompt_load(tmp_path):
    rows = (
        {"prompt": "[0, 1] has what length?", "solution": "34", "reward_model": {"ground_truth": "1"}},
        {"prompt": "q", "answer": "5"},
        {"prompt": "q", "solution": "34"},
        {"prompt": "q", "solution": r"so \boxed{6}"},
    )
    result = read_problems(write(tmp_path / "d.jsonl", *rows))
    assert [p.answer for p in result.problems] == ["1", "5", "34", "6"]
    assert result.problems[0].question == "[0, 1] has what length?"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"problem": "p", "answer": ', "not JSON"),
        ("[1, 2]", "not a JSON object but list"),
        ("3", "not a JSON object but int"),
        ("null", "not a JSON object but NoneType"),
        ("[" * 100_000, "nested too deeply"),
        ({"text": "p", "answer": "1"}, "no question: none of problem, question, prompt among its fields (text, answer)"),
        ({"problem": " \n", "answer": "1"}, "problem is empty"),
        ({"problem": 3, "answer": "1"}, "problem is of type int"),
        ({"problem": "p"}, "no answer"),
        ({"problem": "p", "answer": "so it is\n####  "}, "no answer"),
        ({"problem": "p", "solution": "a proof"}, "no answer"),
        ({"problem": "p", "answer": math.nan}, "answer is nan"),
        ({"problem": "p", "answer": math.inf}, "answer is inf"),
        ({"problem": "p", "answer": True}, "answer is of type bool"),
        ({"problem": "p", "answer": ["1", "2"]}, "answer is of type list"),
        ({"problem": "p \ud800", "answer": "1"}, "surrogate"),
        ({"prompt": [], "answer": "1"}, "prompt must be one user message"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1"},
            "one user message",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}, "other than text"),
        ({"prompt": {"a": 1}, "answer": "1"}, "prompt is of type dict"),
        ({"prompt": "p", "reward_model": "rule"}, "reward_model is not an object"),
        ({"messages": [{"role": "user", "content": "a"}]}, "a recorded conversation"),
    ],
)
def test_a_row_that_is_no_problem_is_named_with_its_line_and_reason(tmp_path, row, reason):
    good = {"problem": "p", "answer": "1"}
    result = read_problems(write(tmp_path / "a.jsonl", good, "", row, good))
    assert len(result.problems) == 2
    ((line, found),) = [(s.line, s.reason) for s in result.skipped]
    assert line == 3
    assert reason in found


def test_byte_order_mark_carriage_returns_and_blank_lines_are_fine(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"problem": "p", "answer": "1"}\r\n\r\n{"problem": "caf\xc3\xa9", "answer": "2"}\r\n')
    result = read_problems(path)
    assert [p.question for p in result.problems] == ["p", "café"]
    assert result.skipped == []


def test_bytes_that_are_not_utf8_cost_their_own_line_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"problem": "p", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n{"problem": "q", "answer": "1"}')
    result = read_problems(path)
    assert [p.question for p in result.problems] == ["p", "q"]
    assert result.skipped == [SkippedRow(2, "not UTF-8 at byte 14 of the line")]


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"problem": "a\u2028b\u0085c", "answer": "1"}\n'.encode())
    assert read_problems(path).problems[0].question == "a\u2028b\u0085c"


def test_items_with_the_same_text_or_the_same_id_stay_distinct(tmp_path):
    """verl#3238: items grouped by their text were merged."""
    same = {"problem": "p", "answer": "1"}
    path = write(tmp_path / "a.jsonl", same, same, same | {"id": "x"}, same | {"id": "x"}, same | {"id": "a:4"}, same | {"id": "a:6"})
    ids = [problem.id for problem in read_problems(path).problems]
    assert ids == ["a:1", "a:2", "x", "a:4", "a:5", "a:6"]


def test_ids_of_the_row_are_used(tmp_path):
    rows = ({"problem": "p", "answer": "1", "id": 12}, {"problem": "p", "answer": "1", "unique_id": "test/3.json"})
    assert [p.id for p in read_problems(write(tmp_path / "a.jsonl", *rows)).problems] == ["12", "test/3.json"]


def test_a_json_file_holds_lines_or_one_array(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, 3, {"problem": "q", "answer": "2"}]
    array, lines = tmp_path / "array.json", write(tmp_path / "lines.json", *map(json.dumps, rows))
    array.write_text(json.dumps(rows, indent=1))
    for path in (array, lines):
        assert answers(path) == ["1", "2"]
        assert [s.line for s in read_problems(path).skipped] == [2]


def test_nulls_and_nan_of_parquet_rows_are_named(tmp_path):
    rows = [{"problem": "p", "answer": 27.0}, {"problem": "p", "answer": None}, {"problem": None, "answer": 1.0}]
    result = read_problems(parquet(tmp_path / "a.parquet", [*rows, {"problem": "p", "answer": math.nan}]))
    assert [p.answer for p in result.problems] == ["27"]
    assert [s.line for s in result.skipped] == [2, 3, 4]


def test_a_limit_stops_after_that_many_problems(tmp_path):
    good = {"problem": "p", "answer": "1"}
    result = read_problems(write(tmp_path / "a.jsonl", "bad", good, good, "bad", good), limit=2)
    assert (len(result.problems), [s.line for s in result.skipped]) == (2, [1])
    with pytest.raises(UserError, match="limit=0"):
        read_problems(tmp_path / "a.jsonl", limit=0)


def test_files_that_cannot_be_evaluated_end_in_one_line_that_names_them(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "fake.parquet").write_text("not parquet")
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "bad.jsonl", "x", "y")
    write(tmp_path / "training.jsonl", {"messages": [], "instance_id": "a"}, {"messages": [], "instance_id": "b"})
    pyarrow.parquet.write_table(pyarrow.table({"problem": pyarrow.array([], pyarrow.string())}), tmp_path / "none.parquet")
    for name, words in {
        "missing.jsonl": "no such file",
        "empty.jsonl": "the file is empty",
        "blank.jsonl": "holds no rows",
        "table.csv": "unknown extension '.csv'",
        "fake.parquet": "not a readable parquet file",
        "folder.jsonl": "is not a file",
        "bad.jsonl": "none of its 2 rows is a problem; line 1: not JSON",
        "training.jsonl": "a training format",
        "none.parquet": "holds no rows",
    }.items():
        with pytest.raises(UserError) as error:
            read_problems(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_data_sets_are_found_by_name_and_by_path(tmp_path):
    file = write(tmp_path / "aime24.jsonl", {"problem": "p", "answer": "1"})
    parquet(tmp_path / "verl.parquet", [VERL])
    (tmp_path / "notes.md").touch()
    assert find_dataset("aime24", tmp_path) == file
    assert find_dataset("aime24.jsonl", tmp_path) == file
    assert find_dataset("verl", tmp_path) == tmp_path / "verl.parquet"
    assert find_dataset(str(file)) == file
    with pytest.raises(UserError, match=r"no data set 'amc' in .*; it has aime24, verl$"):
        find_dataset("amc", tmp_path)
    with pytest.raises(UserError, match="needs the directory"):
        find_dataset("aime24")
    with pytest.raises(UserError, match="no such directory"):
        find_dataset("aime24", tmp_path / "nowhere")
