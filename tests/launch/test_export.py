"""`launch.export`, and runs that start from what it wrote."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from commands import contents, train_arguments

from experiments import quickstart
from rstar_jax.overrides import apply_overrides
from rstar_jax.recipes import inference, pretrained
from rstar_jax.types import UserError


@pytest.fixture(scope="module")
def exported(command, trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "checkpoint"
    before = contents(trained.workdir)
    done = command("launch.export", f"--workdir={trained.workdir}", f"--output={output}")
    assert done.code == 0, done.err
    assert contents(trained.workdir) == before
    assert [path.name for path in output.parent.iterdir()] == ["checkpoint"]
    return output


def test_transformers_loads_what_was_exported(trained, exported):
    run = inference.load_trained(trained.workdir)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("12 plus 30", add_special_tokens=False)["input_ids"]
    assert ids == run.tokenizer.encode(["12 plus 30"])
    assert tokenizer.eos_token_id == run.tokenizer.stop_ids[0] == model.generation_config.eos_token_id[0]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits.numpy()
    assert theirs.shape == (1, len(ids), run.config.model.vocab_size)
    kernel = model.model.layers[0].self_attn.q_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(kernel, run.params["layers"]["q"]["kernel"][0])


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_dtype_auto_is_settled_when_a_run_starts(monkeypatch, exported, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for more in ([], [f"checkpoint={exported}"]):
        config = apply_overrides(quickstart.config(), ["model.dtype=auto", *more])
        assert pretrained.resolve(config).model.dtype == dtype


def test_a_run_starts_from_the_exported_weights(command, trained, exported, tmp_path):
    config = apply_overrides(quickstart.config(), [f"checkpoint={exported}"])
    resolved = pretrained.resolve(config)
    run = inference.load_trained(trained.workdir)
    assert resolved.model == run.config.model  # its architecture wins over the experiment's
    arguments = [*train_arguments(tmp_path / "run"), "--set=stages.sft.steps=1", f"--set=checkpoint={exported}"]
    frozen = [
        *arguments,
        "--set=stages.sft.learning_rate=1e-30",
        "--set=stages.sft.warmup_steps=0",
        "--set=stages.rl1.learning_rate=1e-30",
    ]
    done = command("launch.train", *frozen, "--set=stages.rl2.learning_rate=1e-30")
    assert done.code == 0, done.err
    again = inference.load_trained(tmp_path / "run")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), again.params, run.params)
    assert json.loads((tmp_path / "run" / "pretrained_config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert again.tokenizer.stop_ids == run.tokenizer.stop_ids
    output = tmp_path / "out"
    assert command("launch.export", f"--workdir={tmp_path / 'run'}", f"--output={output}", "--dtype=bfloat16").code == 0
    stored = pretrained.open_checkpoint(str(output))
    assert stored.model == dataclasses.replace(run.config.model) and stored.source.dtype("model.norm.weight") == "BF16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir={0}/nowhere", "--output={0}/x"], "no such directory"),
        (["--workdir={1}"], "--output is missing"),
        (["--workdir={1}", "--output={0}/full"], "exists and is not empty"),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_is_written(command, trained, tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = contents(tmp_path)
    assert message in command("launch.export", *(a.format(tmp_path, trained.workdir) for a in arguments)).refusal()
    assert contents(tmp_path) == before


def test_a_checkpoint_that_is_none_is_refused_before_anything_is_written(command, tmp_path):
    done = command("launch.train", *train_arguments(tmp_path / "run"), f"--set=checkpoint={tmp_path}")
    assert "holds neither model.safetensors" in done.refusal()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="is not a directory"):
        pretrained.open_checkpoint(str(tmp_path / "nowhere"))


def test_a_run_with_adapters_keeps_only_them_and_exports_merged_weights(command, trained, exported, tmp_path):
    arguments = [
        *train_arguments(tmp_path / "run"),
        f"--set=checkpoint={exported}",
        "--set=model.lora_rank=2",
        "--set=stages.sft.steps=6",
    ]
    done = command("launch.train", *arguments, "--set=training.save_every=3")
    assert done.code == 0, done.err
    saved = max((tmp_path / "run" / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)) / "params"
    names = json.loads((saved / "_METADATA").read_text())["tree_metadata"]
    assert names and all("adapter_" in name for name in names)
    again = command("launch.train", *arguments, "--set=training.save_every=3", "--set=stages.rl2.steps=2")
    assert again.code == 0 and "resuming" in again.err + again.out, again.err
    merged = inference.load_trained(tmp_path / "run")
    assert command("launch.export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}").code == 0
    stored = inference.hf.load_params(
        pretrained.open_checkpoint(str(tmp_path / "out")).source, merged.config.model, inference.make_mesh(merged.config.mesh)
    )
    jax.tree.map(np.testing.assert_array_equal, stored, merged.params)
    base = inference.load_trained(trained.workdir).params
    assert np.abs(np.asarray(merged.params["layers"]["q"]["kernel"]) - base["layers"]["q"]["kernel"]).max() > 1e-4
    np.testing.assert_array_equal(merged.params["ends"]["embedding"], base["ends"]["embedding"])
