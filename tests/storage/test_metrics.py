import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from rstar_jax.storage.metrics import MetricsRow, MetricsWriter, deterministic_part, read_metrics
from rstar_jax.types import UserError


def write_steps(directory, steps, *, resume_after=None, clock=1.0):
    with MetricsWriter(directory, resume_after=resume_after) as writer:
        for step in steps:
            writer.write("rl", 1, step, 100 + step, "train", {"reward": step / 3}, {"seconds": clock})


def scalars(directory):
    """(tag, step, value) and the steps of session starts, of every event file in the order written."""
    found, starts = [], []
    for path in sorted(pathlib.Path(directory).glob("tensorboard/*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                starts.append(event.step)
    return found, starts


def test_rows_are_read_back_as_they_were_written(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run", resume_after=None) as writer:
        writer.write("rl", 1, 12, 140, "train", {"reward": 0.1 + 0.2}, {"seconds": 2})
    assert read_metrics(tmp_path / "new" / "run") == [
        MetricsRow("rl", 1, 12, 140, "train", {"reward": 0.30000000000000004}, {"seconds": 2.0})
    ]


def test_a_row_is_on_disk_when_write_returns(tmp_path):
    with MetricsWriter(tmp_path, resume_after=None) as writer:
        writer.write("rl", 0, 1, 1, "train", {"reward": 1.0}, {})
        assert len(read_metrics(tmp_path)) == 1


def test_values_that_json_cannot_hold_become_strings_and_come_back_as_floats(tmp_path):
    with MetricsWriter(tmp_path, resume_after=None) as writer:
        writer.write("rl", 0, 1, 1, "train", {"a": math.nan, "b": math.inf, "c": -math.inf}, {})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row.metrics["a"])
    assert (row.metrics["b"], row.metrics["c"]) == (math.inf, -math.inf)


def test_a_resumed_run_drops_what_it_will_compute_again(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, range(4, 8), resume_after=103)
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_resumed_from_step_zero_or_begun_anew_drops_every_later_row(tmp_path):
    for resume_after in (0, None):
        write_steps(tmp_path, range(1, 6))
        write_steps(tmp_path, [9], resume_after=resume_after)
        assert [row.step for row in read_metrics(tmp_path)] == [9]


def test_a_line_torn_by_a_kill_is_no_row_and_does_not_stop_a_resume(tmp_path):
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"stage": "rl", "stage_ind')
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3]
    write_steps(tmp_path, [4], resume_after=103)
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_writer_killed_between_rows_loses_none(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from rstar_jax.storage.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1], resume_after=None)\n"
        "for step in range(1, 4):\n"
        "    writer.write('rl', 0, step, step, 'train', {'reward': step}, {})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row.metrics["reward"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("line", [b"garbage", b"[1]", b'{"stage": "rl"}', b"\xff"])
def test_a_broken_line_that_no_kill_explains_is_named(tmp_path, line):
    write_steps(tmp_path, [1])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a row"):
        read_metrics(tmp_path)
    assert path.read_bytes().endswith(line + b"\n")


def test_runs_that_differ_in_time_alone_have_equal_deterministic_parts(tmp_path):
    for name, clock in (("a", 1.0), ("b", 2.0)):
        with MetricsWriter(tmp_path / name, resume_after=None) as writer:
            writer.write("rl", 0, 1, 1, "train", {"reward": 0.5, "gap": math.nan}, {"seconds": clock})
    a, b = (read_metrics(tmp_path / name) for name in "ab")
    assert a != b
    assert deterministic_part(a) == deterministic_part(b)
    assert deterministic_part(a)[0]["metrics"] == {"reward": 0.5, "gap": "nan"}


def test_tensorboard_holds_the_same_numbers_and_a_resume_purges_later_ones(tmp_path):
    write_steps(tmp_path / "run", [1, 2])
    found, starts = scalars(tmp_path / "run")
    assert ("rl/reward", 102, pytest.approx(2 / 3)) in found
    assert ("rl/time/seconds", 101, 1.0) in found
    assert starts == [0]
    for path in (tmp_path / "run" / "tensorboard").iterdir():
        path.unlink()
    write_steps(tmp_path / "run", [2], resume_after=101)
    assert scalars(tmp_path / "run")[1] == [102]


def test_no_metrics_file_means_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_an_unknown_kind_is_refused(tmp_path):
    with MetricsWriter(tmp_path, resume_after=None) as writer, pytest.raises(ValueError, match="kind 'eval'"):
        writer.write("rl", 0, 1, 1, "eval", {}, {})


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write metrics to"):
        MetricsWriter(tmp_path / "file", resume_after=None)
