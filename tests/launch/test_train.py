"""`python -m launch.train`: what it leaves, what it prints, and one clear line for every mistake."""

import json
import pathlib
import shutil
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from commands import contents, real, train_arguments

from rstar_jax.config import RunConfig
from rstar_jax.overrides import PRESETS
from rstar_jax.storage.metrics import read_metrics


def test_training_prints_what_was_learned_and_leaves_a_whole_run(trained):
    lines = trained.done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["after", "sft", "rl1", "rl2", "report:"]
    assert lines[-1] == f"report: {trained.workdir / 'report.html'}"
    left = {path.name for path in trained.workdir.iterdir()}
    assert left == {
        "checkpoints", "config.json", "metrics.jsonl", "report.html", "summary.json", "tensorboard", "timeline",
        "tokenizer", "trajectories",
    }  # fmt: skip
    config = RunConfig.from_dict(json.loads((trained.workdir / "config.json").read_text()))
    assert config.model == PRESETS["model"]["tiny"]
    assert [(stage.name, stage.steps) for stage in config.stages] == [("sft", 80), ("rl1", 1), ("rl2", 1)]
    rows = [(row.stage, row.step, row.kind) for row in read_metrics(trained.workdir)]
    ends = [(name, steps, kind) for name, steps in (("sft", 80), ("rl1", 1), ("rl2", 1)) for kind in ("evaluation", "stage_end")]
    assert [row for row in rows if row[2] != "train"] == ends
    assert [row[:2] for row in rows if row[2] == "train"] == [*(("sft", step) for step in range(1, 81)), ("rl1", 1), ("rl2", 1)]


def test_progress_goes_to_standard_error_alone(trained):
    assert any(line.startswith("sft 80/80 loss=") for line in trained.done.err.splitlines())
    assert "loss=" not in trained.done.out
    assert "error: " not in trained.done.err and "Traceback" not in trained.done.err


def test_the_same_command_on_a_finished_run_trains_nothing_more(trained, command, tmp_path):
    workdir = tmp_path / "again"
    shutil.copytree(trained.workdir, workdir)
    before = contents(workdir / "checkpoints"), (workdir / "metrics.jsonl").read_bytes()
    done = command("launch.train", *train_arguments(workdir))
    assert done.code == 0, done.err
    assert f"resuming {workdir} at rl2 step 1 of 1" in done.err.splitlines()
    assert done.out.splitlines()[:-1] == trained.done.out.splitlines()[:-1]
    assert before == (contents(workdir / "checkpoints"), (workdir / "metrics.jsonl").read_bytes())


# --- --dry_run ---


def test_a_dry_run_prints_json_that_reads_back_and_a_line_for_each_stage(command, tmp_path):
    workdir = tmp_path / "run"
    done = command("launch.train", *train_arguments(workdir, "--dry_run", "--set=stages.rl2.keep=4", "--set=seed=7"))
    assert done.code == 0
    config = RunConfig.from_dict(json.loads(done.out))
    assert (config.name, config.seed, config.rollout.slots) == ("quickstart", 7, 16)
    assert config.stages[0].steps == 80 and config.training.buckets == (128,)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert done.err.splitlines() == [
        "stage sft: sft, 80 steps, 16 demonstrations per step",
        "stage rl1: rl, 1 steps, 16 rollouts per step (4 prompts x 4, 2 of each kept)",
        "stage rl2: rl, 1 steps, 16 rollouts per step (4 prompts x 4)",
    ]
    assert not workdir.exists()


def test_every_experiment_resolves(command):
    for name in ("quickstart", "quickstart_srl", "quickstart_async"):
        done = command("launch.train", f"--experiment={name}", "--dry_run")
        assert done.code == 0 and RunConfig.from_dict(json.loads(done.out)).name == name


def test_help_names_the_flags(command):
    done = command("launch.train", "--help")
    assert "--experiment" in done.out and "--workdir" in done.out and "Train an experiment" in done.out


# --- mistakes ---


def test_a_mistake_ends_the_real_command_with_one_line_and_code_2(tmp_path):
    done = real("launch.train", "--experiment=nosuch", f"--workdir={tmp_path / 'run'}")
    assert done.refusal().startswith("--experiment=nosuch is not known; choose one of quickstart, ")
    assert len(done.err.splitlines()) == 1 and done.out == ""
    assert not (tmp_path / "run").exists()


GOOD = ["--experiment=quickstart", "--workdir={}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workdir={}"], "--experiment is missing; choose one of quickstart"),
        (["--experiment=../quickstart", "--workdir={}"], "--experiment=../quickstart is not known"),
        (["--experiment=quickstart"], "--workdir is missing: give a directory for the run"),
        (["--experiment=quickstart", "--workdir="], "--workdir is missing"),
        (["--experiment=quickstart", "--workdirs={}"], "Unknown command line flag 'workdirs'"),
        ([*GOOD, "model=tiny"], "'model=tiny' is not a flag; settings are given as --name=value"),
        ([*GOOD, "--set"], "Missing value for flag --set"),
        ([*GOOD, "--dry_run=perhaps"], "--dry_run=perhaps"),
        ([*GOOD, "--set", "model"], "--set model: expected key=value"),
        ([*GOOD, "--set", "model.layers=3"], "--set model.layers: no such field; ModelConfig has"),
        ([*GOOD, "--set", "modle.d_ff=3"], "--set modle.d_ff: no such section; known: model"),
        ([*GOOD, "--set", "model=huge"], "--set model=huge: no such preset; known: tiny"),
        ([*GOOD, "--set", "stages.rl9.steps=3"], "NAME one of sft, rl1, rl2"),
        ([*GOOD, "--set", "model.d_ff=wide"], "--set model.d_ff=wide: expected a whole number"),
        ([*GOOD, "--set", "stages.rl1.keep=17"], "stages.rl1.keep=17 is more than stages.rl1.group=16"),
    ],
)
def test_bad_arguments_end_in_one_line(command, tmp_path, arguments, words):
    done = command("launch.train", *[argument.format(tmp_path / "run") for argument in arguments])
    assert words in done.refusal()
    assert len(done.err.splitlines()) == 1 and done.out == ""
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_cannot_be_written_is_refused(command, tmp_path):
    file = tmp_path / "file"
    file.write_text("something else")
    for workdir in (file, file / "run", pathlib.Path("/proc/run")):
        message = command("launch.train", *train_arguments(workdir)).refusal()
        assert message.startswith(f"--workdir={workdir} cannot be written: ")
    assert file.read_text() == "something else"


def test_a_workdir_with_other_files_is_refused_and_left_alone(command, tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    before = contents(tmp_path)
    message = command("launch.train", *train_arguments(tmp_path)).refusal()
    assert message == f"{tmp_path} is not empty and holds no run; use an empty or a new directory as --workdir"
    assert contents(tmp_path) == before


def test_a_workdir_of_another_configuration_is_refused_with_every_difference(command, trained):
    before = contents(trained.workdir)
    more = ["--set=seed=1", "--set=stages.rl1.group=6", "--set=training.buckets=128,256"]
    message = command("launch.train", *train_arguments(trained.workdir, *more)).refusal()
    assert message == (
        f"{trained.workdir} holds a run of another configuration "
        "(seed: 0 -> 1; stages.rl1.group: 4 -> 6; training.buckets: [128] -> [128, 256]); use another --workdir"
    )
    assert contents(trained.workdir) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": "x"}', '{"identity": []}', "\ufffd"])
def test_a_damaged_config_is_refused_and_left_alone(command, tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1", "replace") if text != "\ufffd" else b"\xff\xfe")
    (tmp_path / "metrics.jsonl").write_text("")
    before = contents(tmp_path)
    message = command("launch.train", *train_arguments(tmp_path)).refusal()
    assert message.startswith(f"{tmp_path / 'config.json'} ")
    assert contents(tmp_path) == before


ROW = '{"problem": "What is 1 + 1?", "answer": 2}\n'
LONG_ROW = json.dumps({"problem": "one " * 100, "answer": 1}) + "\n"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["text.tokenizer={}/nowhere"], "/nowhere is not a directory; a tokenizer is loaded from a directory"),
        (["text.tokenizer={}"], "holds no tokenizer.json"),
        (["data.source={}/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["data.source={}/empty.jsonl"], "/empty.jsonl: the file is empty"),
        (["data.source={}/malformed.jsonl"], "/malformed.jsonl: none of its 2 rows is a problem; line 1: not JSON"),
        (["data.source={}/long.jsonl"], "1 of 6 prompts are longer than rollout.max_prompt_tokens=32 (the longest has "),
        (["rollout.max_prompt_tokens=4"], "4 of 4 prompts are longer than rollout.max_prompt_tokens=4 (the longest has "),
        (["model.vocab_size=200"], "a vocabulary of 200 is too small"),
        (["mesh.data=2"], "mesh data=2 fsdp=1 tensor=1 does not fit 1 devices"),
    ],
)
def test_what_a_run_cannot_use_is_refused_before_its_directory_exists(command, tmp_path, overrides, words):
    for name, text in {"empty": "", "malformed": "{\nno\n", "long": ROW + LONG_ROW}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    workdir = tmp_path / "run"
    done = command("launch.train", *train_arguments(workdir, *[f"--set={override.format(tmp_path)}" for override in overrides]))
    assert words in done.refusal()
    assert not workdir.exists()
