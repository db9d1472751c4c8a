"""`python -m launch.evaluate`: data sets as they are published, the table, the results file, and one line for every mistake.

The tiny run knows no answers, but what it answers is known (`known_answers`): data sets whose references are these numbers must
be scored as right, and others as wrong.
"""

import json
import pathlib
import re
import shutil
import sys

import pyarrow
import pyarrow.parquet
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from commands import contents, real


def write_rows(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(command, trained, tmp_path):
    """Evaluate greedily; returns the command's end and the content of the results file."""

    def run(dataset, *arguments):
        output = tmp_path / "results.json"
        flags = (
            f"--workdir={trained.workdir}",
            f"--dataset={dataset}",
            f"--output={output}",
            "--samples=1",
            "--temperature=0",
            "--slots=4",
        )
        done = command("launch.evaluate", *flags, *arguments)
        assert done.code == 0, done.err
        assert done.out.splitlines()[-1] == f"results: {output}"
        return done, json.loads(output.read_text())

    return run


def cell(done, name):
    """A number of the printed table."""
    return re.search(rf"^{re.escape(name)} +(\S+)", done.out, re.MULTILINE)[1]


# --- data sets as they are published ---


def test_gsm8k_rows_are_scored_and_a_bad_row_among_them_is_named(evaluate, known_answers, tmp_path):
    rows = [{"question": q, "answer": f"It is easy.\nSo <<1+1=2>>2.\n#### {n:,}"} for q, n in known_answers]
    dataset = write_rows(tmp_path / "gsm8k.jsonl", [rows[0], "{not json\n", *rows[1:], {"question": "What is 1 + 1?"}])
    done, results = evaluate(dataset, "--samples=2")
    assert done.out.splitlines()[0].startswith("skipped line 2: not JSON: ")
    assert done.out.splitlines()[1].startswith(f"skipped line {len(rows) + 2}: no answer: ")
    assert done.out.splitlines()[2] == f"gsm8k.jsonl: {len(rows)} problems, 2 samples each"
    assert (cell(done, "avg@2"), cell(done, "pass@2"), cell(done, "skipped_rows")) == ("1.0000", "1.0000", "2")
    assert results["dataset"] == "gsm8k.jsonl" and results["global_step"] == 82
    assert results["settings"] == {
        "samples": 2, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "max_turns": 30, "max_response_tokens": None, "max_prompt_tokens": None,
        "tools": "python", "seed": 0, "limit": None,
    }  # fmt: skip
    assert results["metrics"]["accuracy"] == 1.0 and results["metrics"]["trajectories"] == 2 * len(rows)
    assert [row["line"] for row in results["skipped"]] == [2, len(rows) + 2]


def test_aime_rows_hold_their_answer_as_a_number(evaluate, known_answers, tmp_path):
    rows = [{"id": i, "problem": q, "answer": n + (i == 0)} for i, (q, n) in enumerate(known_answers)]
    done, results = evaluate(write_rows(tmp_path / "aime.jsonl", rows))
    assert results["metrics"]["accuracy"] == pytest.approx((len(rows) - 1) / len(rows))
    assert results["metrics"]["tool_calls"] > 0 and cell(done, "unknown") == "0"


def test_latex_references_are_compared_by_value(evaluate, known_answers, tmp_path):
    (q1, n1), (q2, n2) = known_answers[:2]
    rows = [
        {"problem": q1, "answer": rf"\frac{{{2 * n1}}}{{2}}", "subject": "Algebra", "unique_id": "test/1.json"},
        {"problem": q2, "answer": rf"\frac{{{n2}}}{{2}}", "subject": "Algebra", "unique_id": "test/2.json"},
    ]
    _, results = evaluate(write_rows(tmp_path / "math500.jsonl", rows))
    assert results["metrics"]["accuracy"] == 0.5 and results["metrics"]["unknown"] == 0


def test_the_last_box_of_a_solution_stands_in_for_an_absent_answer(evaluate, known_answers, tmp_path):
    rows = [{"problem": q, "solution": rf"First \boxed{{0}}, then \boxed{{{n}}}.", "type": "Physics"} for q, n in known_answers]
    _, results = evaluate(write_rows(tmp_path / "minerva.jsonl", rows))
    assert results["metrics"]["accuracy"] == 1.0 and results["metrics"]["problems"] == len(rows)


def test_verl_parquet_rows_are_read(evaluate, known_answers, tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "test", "index": i},
        }
        for i, (question, number) in enumerate(known_answers)
    ]
    dataset = tmp_path / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), dataset)
    _, results = evaluate(dataset)
    assert results["metrics"]["accuracy"] == 1.0 and results["metrics"]["problems"] == len(rows)


# --- settings ---

LONG = {"problem": "Add " + ", ".join(map(str, range(100, 200))) + ".", "answer": 14950}


def test_slots_fit_the_longest_prompt_and_longer_ones_than_asked_for_are_counted(evaluate, known_answers, tmp_path):
    rows = [*({"problem": q, "answer": n} for q, n in known_answers), LONG]
    dataset = write_rows(tmp_path / "mixed.jsonl", rows)
    done, results = evaluate(dataset)
    assert results["metrics"]["trajectories"] == len(rows) and cell(done, "too_long") == "0"
    done, results = evaluate(dataset, "--max_prompt_tokens=64")
    assert results["metrics"]["trajectories"] == len(rows) - 1 and cell(done, "too_long") == "1"
    assert results["metrics"]["accuracy"] == 1.0 and results["settings"]["max_prompt_tokens"] == 64


def test_a_limit_takes_the_first_problems(evaluate, known_answers, tmp_path):
    rows = [{"problem": q, "answer": n if i < 2 else -1} for i, (q, n) in enumerate(known_answers)]
    done, results = evaluate(write_rows(tmp_path / "some.jsonl", rows), "--limit=2", "--samples=2")
    assert results["metrics"]["problems"] == 2 and results["metrics"]["accuracy"] == 1.0
    assert done.out.startswith("some.jsonl: 2 problems, 2 samples each\n")


def test_without_tools_a_rollout_is_one_turn_and_no_call_is_answered(evaluate, known_answers, tmp_path):
    dataset = write_rows(tmp_path / "aime.jsonl", [{"problem": q, "answer": n} for q, n in known_answers])
    done, results = evaluate(dataset, "--tools=none")
    assert results["metrics"]["turns"] == 1.0
    assert cell(done, "tool_error_rate") == "-" and results["metrics"]["tool_error_rate"] == "nan"


def test_prompts_that_announce_the_tool_fit_their_slots(command, trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained.workdir, workdir)
    config = json.loads((workdir / "config.json").read_text())
    config["text"]["chat"] = "rstar2"  # its prompt describes the tool, in some hundred tokens
    (workdir / "config.json").write_text(json.dumps(config))
    dataset = write_rows(tmp_path / "one.jsonl", [{"problem": "What is 1 + 1?", "answer": 2}])
    done = command("launch.evaluate", f"--workdir={workdir}", f"--dataset={dataset}", "--samples=2", "--max_response_tokens=16")
    assert done.code == 0, done.err
    assert done.out.startswith("one.jsonl: 1 problem, 2 samples each\n") and cell(done, "too_long") == "0"


def test_the_run_is_left_as_it_is_but_for_its_results(trained, tmp_path):
    workdir, datasets = tmp_path / "run", tmp_path / "datasets"
    shutil.copytree(trained.workdir, workdir)
    unfinished = workdir / "checkpoints" / "99.orbax-checkpoint-tmp-1"  # a trainer may be writing it right now
    unfinished.mkdir()
    (unfinished / "part").write_text("half")
    before = contents(workdir)
    datasets.mkdir()
    write_rows(datasets / "one.jsonl", [{"problem": "What is 1 + 1?", "answer": 2}])
    flags = (f"--workdir={workdir}", "--dataset=one", f"--data_dir={datasets}", "--samples=4", "--slots=4")
    done = real("launch.evaluate", *flags)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err and "evaluate 4/4 accuracy=" in done.err
    after = contents(workdir)
    assert after.keys() - before.keys() == {"evaluations", "evaluations/one.json"}
    assert {name: after[name] for name in before} == before


# --- mistakes ---


GOOD = ["--workdir={1}", "--dataset={0}/good.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset={0}/good.jsonl"], "--workdir is missing: give the directory of a trained run"),
        (["--workdir={1}"], "--dataset is missing: give a .jsonl or .parquet file, or a name in --data_dir"),
        ([*GOOD, "--model={0}"], "--workdir and --model were both given; give one of them"),
        (["--model={0}/nowhere", "--dataset={0}/good.jsonl"], "/nowhere: no such directory, and no known name (smollm2-135m-instruct)"),
        (["--model={0}", "--dataset={0}/good.jsonl"], "holds neither model.safetensors nor model.safetensors.index.json"),
        (["--workdir={0}/nowhere", "--dataset={0}/good.jsonl"], "/nowhere: no such directory; give that of a trained run"),
        (["--workdir={0}", "--dataset={0}/good.jsonl"], "holds no run (config.json is missing)"),
        (["--workdir={1}", "--dataset={0}/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["--workdir={1}", "--dataset={0}"], "is not a file; give one file"),
        (["--workdir={1}", "--dataset={0}/empty.jsonl"], "/empty.jsonl: the file is empty"),
        (["--workdir={1}", "--dataset={0}/malformed.jsonl"], "malformed.jsonl: none of its 2 rows is a problem; line 1: not JSON"),
        (["--workdir={1}", "--dataset={0}/broken.parquet"], "broken.parquet: not a readable parquet file"),
        (["--workdir={1}", "--dataset={0}/training.jsonl"], "training.jsonl: its rows are recorded conversations (`messages`)"),
        (["--workdir={1}", "--dataset=aime99", "--data_dir={0}"], "no data set 'aime99' in "),
        (["--workdir={1}", "--dataset=aime99", "--data_dir={0}/nowhere"], "/nowhere: no such directory of data sets"),
        ([*GOOD, "--limit=0"], "--limit=0"),
        ([*GOOD, "--samples=many"], "--samples=many"),
        ([*GOOD, "--tools=perl"], "--tools=perl"),
        ([*GOOD, "--output={0}"], "is a directory; give the file to write"),
        ([*GOOD, "--output={0}/good.jsonl/x"], "/good.jsonl/x cannot be written: Not a directory"),
        ([*GOOD, "--max_prompt_tokens=3"], "every prompt is longer than --max_prompt_tokens=3 (the shortest has "),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(command, trained, tmp_path, arguments, words):
    for name, text in {
        "good.jsonl": '{"problem": "What is 1 + 1?", "answer": 2}\n',
        "empty.jsonl": "",
        "malformed.jsonl": "{\nno\n",
        "broken.parquet": "PAR1",
        "training.jsonl": '{"messages": [{"role": "user", "content": "Hi"}], "instance_id": "x"}\n',
    }.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path), contents(trained.workdir)
    done = command("launch.evaluate", *[argument.format(tmp_path, trained.workdir) for argument in arguments])
    assert words in done.refusal()
    assert len(done.err.splitlines()) == 1 and done.out == ""
    assert (contents(tmp_path), contents(trained.workdir)) == before


@pytest.mark.parametrize("kept", ["config.json", "config.json and an empty folder", "a damaged config.json", "another config.json"])
def test_a_run_without_a_checkpoint_or_with_a_damaged_config_is_refused(command, trained, tmp_path, kept):
    workdir = tmp_path / "run"
    workdir.mkdir()
    shutil.copy(trained.workdir / "config.json", workdir)
    if "folder" in kept:
        (workdir / "checkpoints").mkdir()
    if "damaged" in kept:
        (workdir / "config.json").write_text((workdir / "config.json").read_text()[:100])
    if "another" in kept:
        (workdir / "config.json").write_text('{"stages": 3}')
    before = contents(workdir)
    dataset = write_rows(tmp_path / "one.jsonl", [{"problem": "What is 1 + 1?", "answer": 2}])
    message = command("launch.evaluate", f"--workdir={workdir}", f"--dataset={dataset}").refusal()
    words = {
        "config.json": f"{workdir} has no checkpoint yet; train it first",
        "config.json and an empty folder": f"{workdir} has no complete checkpoint yet; train it for longer",
        "a damaged config.json": f"{workdir / 'config.json'} cannot be read as the configuration of a run (",
        "another config.json": f"{workdir / 'config.json'} is not the configuration of a run (",
    }
    assert message.startswith(words[kept])
    assert contents(workdir) == before


def test_a_mistake_ends_the_real_command_with_one_line_and_code_2(tmp_path):
    done = real("launch.evaluate", f"--model={tmp_path / 'nowhere'}", "--dataset=x.jsonl")
    assert done.refusal() == f"--model={tmp_path / 'nowhere'}: no such directory, and no known name (smollm2-135m-instruct)"
    assert len(done.err.splitlines()) == 1 and done.out == ""
