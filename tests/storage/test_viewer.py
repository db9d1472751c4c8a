import json

from rstar_jax.storage.trajectories import write_trajectories
from rstar_jax.storage.viewer import MAX_GROUPS, MAX_TEXT, clipped, embed, script_json


def test_embedded_json_cannot_end_its_script_element():
    value = {"a": "</script><script>alert(1)</script><!--", "b": ["\u2028 & \ud800", float("nan")]}
    text = script_json(value)
    assert not set(text) & set("<>&\u2028")
    assert text.isascii()
    assert json.loads(text) == value | {"b": ["\u2028 & \ud800", "nan"]}


def test_a_long_text_keeps_both_ends_and_says_what_is_missing():
    text = "a" * MAX_TEXT + "b" * 100
    short = clipped({"x": [text, "short", 3, None]})["x"]
    assert short[1:] == ["short", 3, None]
    assert short[0].startswith("a" * (MAX_TEXT // 2))
    assert short[0].endswith("b" * 100)
    assert "[... 100 characters left out of this page ...]" in short[0]


def test_first_middle_and_last_steps_are_embedded_and_the_rest_is_told(tmp_path, new_rollout, new_record):
    for step in range(1, 8):
        write_trajectories(tmp_path, "rl", step, [new_record(new_rollout(), step=step)])
    embedded = embed(tmp_path, ["sft", "rl"])
    assert [step["step"] for step in json.loads(embedded.data)["steps"]] == [1, 4, 7]
    assert embedded.notes == ("The viewer holds 3 of 7 recorded steps: the first, the middle and the last of each stage.",)
    assert embedded.rollouts == 3


def test_nothing_left_out_means_no_note(tmp_path, new_rollout, new_record):
    write_trajectories(tmp_path, "rl", 1, [new_record(new_rollout(sample)) for sample in range(3)])
    embedded = embed(tmp_path, ["rl"])
    assert embedded.notes == ()
    (step,) = json.loads(embedded.data)["steps"]
    ((group, total),) = [(group, group["total"]) for group in step["groups"]]
    assert total == 3
    assert [rollout["sample"] for rollout in group["rollouts"]] == [0, 1, 2]


def test_problems_beyond_the_limit_are_counted(tmp_path, new_rollout, new_record):
    records = [new_record(new_rollout(s, problem_id=f"p:{p}")) for p in range(MAX_GROUPS + 3) for s in range(2)]
    write_trajectories(tmp_path, "rl", 1, records)
    embedded = embed(tmp_path, ["rl"])
    assert embedded.rollouts == 2 * MAX_GROUPS
    assert f"Of the {2 * MAX_GROUPS + 6} rollouts of these steps it holds {2 * MAX_GROUPS}" in embedded.notes[0]


def test_the_budget_of_bytes_holds_and_what_did_not_fit_is_counted(tmp_path, new_rollout, new_record):
    for step in (1, 2, 3):
        records = [new_record(new_rollout(sample, question="x" * 3_000), step=step) for sample in range(20)]
        write_trajectories(tmp_path, "rl", step, records)
    embedded = embed(tmp_path, ["rl"], max_bytes=60_000)
    assert 10_000 < len(embedded.data) < 62_000
    steps = json.loads(embedded.data)["steps"]
    assert [group["total"] for step in steps for group in step["groups"]] == [20, 20, 20]
    shown = sum(len(group["rollouts"]) for step in steps for group in step["groups"])
    assert 3 <= shown == embedded.rollouts < 60
    assert f"Of the 60 rollouts of these steps it holds {shown}" in embedded.notes[0]


def test_a_run_without_rollouts_embeds_none(tmp_path):
    embedded = embed(tmp_path, ["rl"])
    assert (json.loads(embedded.data), embedded.notes, embedded.rollouts) == ({"steps": []}, (), 0)
