import json
import math

import pytest

from rstar_jax.storage.trajectories import read_trajectories, recorded_steps, write_trajectories
from rstar_jax.types import UserError


def test_spans_tell_prompt_sampled_and_observed_tokens_apart(new_rollout, new_record):
    spans = new_record(new_rollout())["spans"]
    assert spans == [
        {"kind": "prompt", "start": 0, "stop": 4, "text": "2+2?"},
        {"kind": "sampled", "start": 4, "stop": 8, "text": "call", "mean_logp": -1.0},
        {"kind": "observed", "start": 8, "stop": 9, "text": "4"},
        {"kind": "sampled", "start": 9, "stop": 13, "text": "done", "mean_logp": -2.0},
    ]


def test_spans_follow_how_tokens_were_appended_whatever_their_text_says(new_rollout, new_record):
    """RAGEN#71: markers inside the content were taken for turns."""
    shown = "<|im_start|>assistant\ncall"
    spans = new_record(new_rollout(shown=shown))["spans"]
    assert [span["kind"] for span in spans] == ["prompt", "sampled", "observed", "sampled"]
    assert spans[2]["text"] == shown


def test_a_record_holds_what_the_run_decided_and_no_clock(new_rollout, new_record):
    record = new_record(new_rollout(sample=3))
    facts = {key: record[key] for key in ("problem_id", "question", "answer", "family", "sample", "finish", "reward", "reason")}
    assert facts == {
        "problem_id": "p:1", "question": "2+2?", "answer": "4", "family": "sums", "sample": 3, "finish": "stop", "reward": 1.0,
        "reason": "as expected",
    }  # fmt: skip
    assert (record["selected"], record["advantage"], record["penalties"]) == (True, 0.5, {"error": 0.5, "format": 0.0})
    assert record["tokens"] == {"prompt": 4, "response": 9, "sampled": 8}
    assert record["ids"] == [ord(c) for c in "2+2?call4done"]
    assert record["turns"][0] == {
        "start": 4,
        "stop": 8,
        "finish": "stop",
        "text": "call",
        "calls": [
            {
                "name": "python", "arguments": {"code": "print(2+2)"}, "status": "error", "is_error": True, "shown": "4",
                "executed": True, "inside_reasoning": True,
            }
        ],
    }  # fmt: skip
    assert "0.25" not in json.dumps(record)  # the run time of the call


def test_an_unknown_verdict_is_null_and_not_zero(new_rollout, new_record):
    assert new_record(new_rollout(), reward=None)["reward"] is None


def test_a_file_is_read_back_as_it_was_written(tmp_path, new_rollout, new_record):
    records = [new_record(new_rollout(sample=i, question="π \ud800 </script>\n\u2028")) for i in range(3)]
    path = write_trajectories(tmp_path, "rl", 12, records)
    assert path == tmp_path / "trajectories" / "rl" / "step_000012.jsonl"
    assert read_trajectories(path) == records
    assert len(path.read_bytes().splitlines()) == 3


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, new_rollout, new_record):
    path = write_trajectories(tmp_path, "rl", 1, [new_record(new_rollout())])
    before = path.read_bytes()

    def broken():
        yield new_record(new_rollout())
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_trajectories(tmp_path, "rl", 1, broken())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_values_that_json_cannot_hold_are_written_by_name(tmp_path, new_rollout, new_record):
    record = new_record(new_rollout()) | {"advantage": math.nan}
    assert read_trajectories(write_trajectories(tmp_path, "rl", 1, [record]))[0]["advantage"] == "nan"


@pytest.mark.parametrize("line", ["{", "3", '{"problem_id": 1}'])
def test_a_line_that_is_no_rollout_is_named(tmp_path, line, new_rollout, new_record):
    path = write_trajectories(tmp_path, "rl", 1, [new_record(new_rollout())])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"step_000001\.jsonl line 2 is not a recorded rollout"):
        read_trajectories(path)


def test_steps_are_listed_in_order_by_stage(tmp_path, new_rollout, new_record):
    for step in (200, 3, 10):
        write_trajectories(tmp_path, "rl", step, [new_record(new_rollout())])
    found = recorded_steps(tmp_path, ["sft", "rl"])
    assert {stage: [path.stem for path in paths] for stage, paths in found.items()} == {
        "rl": ["step_000003", "step_000010", "step_000200"]
    }
