"""The documentation against the code: its examples run, and what it names exists."""

import ast
import asyncio
import dataclasses
import importlib
import io
import itertools
import json
import pathlib
import re
import shlex
import sys
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "rollout"))
from scripted import ScriptedEngine

from launch.train import load_experiment
from rstar_jax import config as configuration
from rstar_jax.config import MeshConfig, ModelConfig, RunConfig, StageConfig, ToolConfig, TrainingConfig
from rstar_jax.model.sharding import make_mesh
from rstar_jax.overrides import PRESETS, apply_overrides
from rstar_jax.recipes.progress import Progress
from rstar_jax.rollout.agent import Agent, Budget
from rstar_jax.text.chat import CHAT_FORMATS
from rstar_jax.text.tokenizer import train_tokenizer
from rstar_jax.training.batching import Row, microbatches
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import init_state
from rstar_jax.training.update import Update
from rstar_jax.types import Finish, Marker, Problem, Sampled, SampleKey, Sampling, Tool, ToolStatus, TrainBatch, Trajectory

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTENDING = ROOT / "docs" / "extending.md"
EXAMPLES = ("A reward", "A tool", "An objective", "An experiment")
CONFIGURATION = ROOT / "docs" / "configuration.md"
RUN = RunConfig("run", (StageConfig("rl", "rl", 7),), tool=ToolConfig(workers=1, concurrency=1))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def sections(page, level):
    """Text under each heading of a level, by the heading's text; fenced blocks may hold lines that look like headings."""
    text, found = page.read_text(), {}
    fenced = [range(*match.span()) for match in FENCED.finditer(text)]
    heads = [m for m in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE) if not any(m.start() in span for span in fenced)]
    for i, head in enumerate(heads):
        if len(head[1]) == level:
            end = next((later.start() for later in heads[i + 1 :] if len(later[1]) <= level), len(text))
            found[head[2]] = text[head.end() : end]
    return found


def table(text):
    """Rows of the first table in `text`: cells without backticks."""
    lines = [line for line in text.split("\n\n|", 1)[-1].split("\n\n")[0].splitlines() if "|" in line]
    cells = [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
    return cells[2:]


# --- the examples of extending.md ------------------------------------------------------------------------------------


def example(heading):
    """(new file, its code, changed file, the change): what a section of extending.md says to write."""
    text = sections(EXTENDING, 2)[heading]
    new, code = re.search(r"^New file `([^`]+)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL).groups()
    change = re.search(r"^In `([^`]+)`:\n\n```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return (new, code, *(change.groups() if change else (None, None)))


def execute(name, source, monkeypatch):
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def patched(source, change):
    """`source` with a diff without line numbers applied; every context and removed line must be there."""
    lines, at, waiting = source.splitlines(), None, []
    for mark, line in ((line[:1], line[1:]) for line in change.splitlines()):
        if mark == "+":
            if at is None:
                waiting.append(line)
            else:
                lines.insert(at, line)
                at += 1
            continue
        assert mark in " -" and lines.count(line) == 1, f"{line!r} stands {lines.count(line)} times in the file"
        index = lines.index(line, at or 0)
        lines[index : index + (mark == "-")] = waiting
        at, waiting = index + len(waiting) + (mark == " "), []
    assert not waiting
    return "\n".join(lines) + "\n"


def plugged(heading, monkeypatch):
    """The example's module, and the file that it plugs into with the change applied."""
    new, code, file, change = example(heading)
    module = execute(new.removesuffix(".py").replace("/", "."), code, monkeypatch)
    return module, execute(f"changed_{pathlib.Path(file).stem}", patched((ROOT / file).read_text(), change), monkeypatch)


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_is_a_new_file_that_keeps_the_floors(heading, tmp_path):
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tests" / "test_architecture.py")
    architecture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(architecture)
    new, code, *_ = example(heading)
    assert not (ROOT / new).exists() and (ROOT / new).parent.is_dir()
    (tmp_path / "example.py").write_text(code)
    if new.startswith("rstar_jax/"):
        assert architecture.violations(tmp_path / "example.py", new.split("/")[1]) == []


def finished(problem, text):
    trajectory = Trajectory(problem, 0, [1])
    trajectory.append_sampled(Sampled((2,), (-0.1,), Finish.STOP), text)
    trajectory.close(Finish.STOP)
    return trajectory


def test_the_reward_example_pays_half_for_a_bare_box(monkeypatch):
    module, run = plugged("A reward", monkeypatch)

    async def values():
        async with run.open_tools(RUN, Progress(io.StringIO())) as (_, reward):
            assert isinstance(reward, module.HalfCredit)
            cases = [
                (r"<answer>\boxed{7}</answer>", "7"),
                (r"so \boxed{07}", "7"),
                (r"\boxed{7}, no: \boxed{8}", "7"),
                (r"\boxed{7} <answer>\boxed{8}</answer>", "7"),
                (r"\boxed{7} <answer>seven</answer>", "7"),
                ("7", "7"),
                (r"\boxed{7}", None),
            ]
            problems = [Problem(str(i), "?", answer) for i, (_, answer) in enumerate(cases)]
            return [(await reward(p, finished(p, text))).value for p, (text, _) in zip(problems, cases, strict=True)]

    assert asyncio.run(values()) == [1.0, 0.5, 0.0, 0.0, 0.5, 0.0, None]


def test_the_tool_example_serves_the_agent(monkeypatch):
    run = plugged("A tool", monkeypatch)[1]
    tokenizer, chat = train_tokenizer(["What is 1/3+1/6?"], 300), CHAT_FORMATS["rstar2"]

    def call(expression):
        body = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        return tokenizer.encode(["</reason>", Marker("<tool_call>"), body, Marker("</tool_call>"), Marker("<|im_end|>")])

    answer = tokenizer.encode([r"</reason><answer>\boxed{1/2}</answer>", Marker("<|im_end|>")])
    engine = ScriptedEngine([call("(1/3+1/6) * -4"), call("1/(2-2)"), call("2**9"), answer], tokenizer.stop_ids)

    async def rollout():
        async with run.open_tools(RUN, Progress(io.StringIO())) as (tools, _):
            assert list(tools) == ["python_code_with_standard_io", "calculator"]
            agent = Agent(engine, tools, chat, tokenizer, Budget(8192, 8192, 5, 128))
            return await agent.run(Problem("p", "What is 1/3+1/6?"), SampleKey(0, 0, 0, 0), Sampling())

    trajectory = asyncio.run(rollout())
    assert trajectory.finish is Finish.STOP
    assert [(c.name, c.status, c.shown) for c in trajectory.calls] == [
        ("calculator", ToolStatus.OK, "-2"),
        ("calculator", ToolStatus.ERROR, "Error: division by zero"),
        ("calculator", ToolStatus.REJECTED, "Error: only whole numbers, brackets and + - * / are known"),
    ]
    assert [c.executed for c in trajectory.calls] == [True, True, False]
    prompt = tokenizer.decode(trajectory.ids[: trajectory.prompt_length].tolist())
    assert '"name": "calculator"' in prompt and '"name": "python_code_with_standard_io"' in prompt
    first, second = trajectory.turns[:2]
    assert "<tool_response>\n-2\n</tool_response>" in tokenizer.decode(trajectory.ids[first.stop : second.start].tolist())


def test_the_tool_example_never_raises_for_what_a_model_writes(monkeypatch):
    tool = plugged("A tool", monkeypatch)[0].Calculator()
    assert isinstance(tool, Tool)
    bad = ["", "(" * 199, "1" * 201, "1\0", "x", "True", "1.5", "f(1)", "-" * 199, "1 if 1 else 2", "é", None, 3, ["1"]]
    for arguments in [{}, *({"expression": value} for value in bad)]:
        result = asyncio.run(tool.call(arguments))
        assert result.status is ToolStatus.REJECTED and tool.format(result).startswith("Error: "), arguments


def make_batch(**fields):
    one = np.ones((1, 3), np.int32)
    blank = np.zeros((1, 3), np.float32)
    return TrainBatch(one, np.arange(3)[None], one, **({"sampler_logp_bt": blank} | fields))


def test_the_objective_example_gives_the_number_worked_out_by_hand(monkeypatch):
    loss = plugged("An objective", monkeypatch)[1].loss_function(StageConfig("rl", "rl", 1, objective="reinforce"))
    batch = make_batch(
        trainable_bt=np.array([[False, True, True]]),
        advantage_bt=np.array([[np.nan, 1.0, -2.0]], np.float32),
        old_logp_bt=np.full((1, 3), np.nan, np.float32),
    )
    logp = jnp.log(jnp.asarray([[jnp.nan, 0.5, 0.2]]))
    sums = loss(logp, logp, batch)
    assert float(sums.values["loss"]) == pytest.approx(-2.52573, abs=1e-4)  # -(1 ln 0.5) - (-2 ln 0.2) = 0.69315 - 3.21888
    assert int(sums.counts["loss"]) == 2
    gradient = jax.grad(lambda x: loss(x, x, batch).values["loss"])(logp)
    np.testing.assert_allclose(gradient, [[0.0, -1.0, 2.0]], rtol=1e-5)


def test_the_objective_example_trains_in_a_real_update(monkeypatch):
    changed = plugged("An objective", monkeypatch)[1]
    stage = StageConfig("rl", "rl", 1, learning_rate=1e-2, objective="reinforce")
    model = ModelConfig(vocab_size=32, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8)
    mesh, optimizer = make_mesh(MeshConfig(1), jax.devices()[:1]), make_optimizer(stage, TrainingConfig())
    update = Update(model, changed.loss_function(stage), optimizer, 1.0, mesh)
    state = init_state(model, optimizer, 0, mesh)
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(0, 32, 6), np.arange(6) >= 2, np.full(6, -3.0, np.float32), a) for a in (1.0, 1.0, -0.5)]
    batches = microbatches(rows, buckets=(8,), microbatch_tokens=64, nominal_rows=3)
    advantage, trainable = batches[0].advantage_bt, batches[0].trainable_bt

    def mean_loss(state):
        logp = np.asarray(update.score(state, update.place(batches[0])).old_logp_bt, np.float64)
        return -np.mean((advantage * logp)[trainable])

    before = mean_loss(state)
    state, means = update.steps(state, [batches], False)
    assert means["loss"] == pytest.approx(before, rel=1e-5)
    assert means["grad_norm"] > 0 and means["skipped"] == 0
    assert mean_loss(state) < before - 0.01


def test_the_experiment_example_changes_the_selection_alone(monkeypatch):
    new, code, *_ = example("An experiment")
    module = execute(new.removesuffix(".py").replace("/", "."), code, monkeypatch)
    assert all((module.TITLE, module.SHOWS, module.DOES_NOT_SHOW))
    base = load_experiment("quickstart").config()
    plain = [json.loads(json.dumps(config.to_dict())) for config in (base, module.config().validate())]
    changed = configuration.differences(*plain)
    selections = [f"stages.{s.name}.selection: paper -> random" for s in base.stages if s.kind == "rl"]
    assert selections and changed == ["name: quickstart -> quickstart_random", *selections]


# --- the tables of configuration.md ----------------------------------------------------------------------------------


def documented():
    """Section name -> {field: default as written}."""
    found = {name: {row[0]: row[1] for row in table(text)} for name, text in sections(CONFIGURATION, 3).items()}
    return {name: found[name] for name in ("run", *configuration.SECTIONS, "stages")}


@pytest.mark.parametrize("name", ["run", *configuration.SECTIONS, "stages"])
def test_every_field_and_no_other_is_documented_with_its_default(name):
    written = documented()[name]
    kind = {"run": RunConfig, "stages": StageConfig}.get(name) or typing.get_type_hints(RunConfig)[name]
    fields = {f.name: f for f in dataclasses.fields(kind) if name != "run" or f.name not in configuration.SECTIONS}
    assert list(written) == list(fields)
    base = RunConfig("run", (StageConfig("rl", "rl", 7),))
    prefix = {"run": "", "stages": "stages.rl."}.get(name, f"{name}.")
    for field, default in written.items():
        required = fields[field].default is dataclasses.MISSING
        assert (default == "required") == required, field
        if not required:
            assert apply_overrides(base, [f"{prefix}{field}={default}"]) == base, f"{prefix}{field} is not {default} by default"


def test_every_preset_is_documented():
    rows = re.findall(r"^\| (\w+) \| (`.*) \|$", sections(CONFIGURATION, 2)["Presets"], re.MULTILINE)
    written = {section: re.findall(r"`([^`]+)`", names) for section, names in rows}
    assert written == {section: list(presets) for section, presets in PRESETS.items()}


def program(module):
    """The source of a module that `python -m` runs."""
    return ROOT / (module.replace(".", "/") + ".py")


def defined_flags(module):
    """Flag name -> default of a program, read from its source."""
    calls = [node for node in ast.walk(ast.parse(program(module).read_text())) if isinstance(node, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr.startswith("DEFINE_")]
    return {ast.literal_eval(c.args[0]): ast.literal_eval(c.args[1]) for c in calls}


PROGRAMS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [*sorted((ROOT / "launch").glob("*.py")), *sorted((ROOT / "experiments" / "benchmarks").glob("*.py"))]
    if "cli.run(main)" in path.read_text()
]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_flag_is_documented_with_its_default(module):
    text = sections(CONFIGURATION, 3)[module]
    written = {row[0].removeprefix("--"): row[1] for row in table(text[text.index("| flag |") - 2 :])}
    defined = defined_flags(module)
    assert list(written) == list(defined)
    for name, default in defined.items():
        if default not in (None, []):
            shown = ",".join(default) if isinstance(default, list) else str(default).lower().removesuffix(".0")
            assert written[name] == shown, name


# --- what the pages name ---------------------------------------------------------------------------------------------


def commands(page):
    """(module, arguments) of every `python -m` command of ours."""
    text = page.read_text().replace("\\\n", " ")
    for module, rest in re.findall(r"python -m ([\w.]+)([^`)\n]*)", text):
        if module.split(".")[0] in ("launch", "experiments"):
            yield module, shlex.split(rest)


@each_page
def test_every_command_names_a_program_its_flags_and_valid_settings(page):
    written_here = {example(heading)[0] for heading in EXAMPLES}
    for module, arguments in commands(page):
        assert program(module).is_file(), module
        given = re.findall(r"--(\w+)", " ".join(arguments))
        assert set(given) <= set(defined_flags(module)), (module, arguments)
        names = [a.partition("=")[2] for a in arguments if a.startswith("--experiment=")]
        if names and f"experiments/{names[0]}.py" not in written_here:
            settings = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
            apply_overrides(load_experiment(names[0]).config(), settings)


@each_page
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)) <= targets


def test_what_the_page_says_the_makefile_sets_is_set_there():
    assert "The Makefile sets it" in sections(CONFIGURATION, 2)["Environment variables"]
    assert re.search(r"^export GLIBC_TUNABLES \?= glibc\.malloc\.hugetlb=1$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def anchors(page):
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_relative_links_resolve(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text()))
    for target in targets:
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def exists_in_code(name):
    """Whether `room.module.attribute` (or `types.attribute`) can be imported."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module("rstar_jax." + ".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def exists_in_configuration(name):
    section, _, field = name.partition(".")
    if section == "stages":
        field = field.partition(".")[2]
    kind = StageConfig if section == "stages" else typing.get_type_hints(RunConfig).get(section)
    return dataclasses.is_dataclass(kind) and field in {f.name for f in dataclasses.fields(kind)}


@each_page
def test_every_name_of_the_code_exists(page):
    first = {"types", "config", "stages", *configuration.SECTIONS, *(p.name for p in (ROOT / "rstar_jax").iterdir() if p.is_dir())}
    new = {example(heading)[0] for heading in EXAMPLES}
    for name in re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text())):
        dotted = re.fullmatch(r"(\w+)(?:\.\w+)+", name.partition("=")[0])
        if dotted and dotted[1] in first and not name.endswith((".py", ".json")):
            key = dotted[0].replace("stages.NAME.field", "stages.NAME.steps")
            assert exists_in_configuration(key) or exists_in_code(key), name
        elif re.fullmatch(r"[\w/]+/(?:[\w]+\.\w+)?", name) and name not in new:
            top = name.split("/")[0]
            if top in ("rstar_jax", "tests", "experiments", "launch", "docs"):
                assert (ROOT / name).exists(), name
            elif (ROOT / "rstar_jax" / top).is_dir():
                assert (ROOT / "rstar_jax" / name).exists(), name


@each_page
def test_no_figure_is_left_open(page):
    assert re.findall(r"@@\w+@@", page.read_text()) == []
