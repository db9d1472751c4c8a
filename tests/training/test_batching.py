"""Rows into microbatches of static shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.training.batching import Row, microbatches, rows_per_microbatch, trajectory_row
from rstar_jax.types import Finish, Problem, Sampled, Trajectory, UserError


def make_row(index, length):
    ids = np.full(length, index, np.int32)
    return Row(ids, np.arange(length) % 2 == 1, np.full(length, -0.5, np.float32), float(index))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 64), max_size=40),
    tokens=st.integers(1, 512),
    shards=st.sampled_from([1, 2, 4]),
    nominal=st.integers(1, 50),
)
def test_every_row_stands_in_exactly_one_microbatch_of_a_declared_shape(lengths, tokens, shards, nominal):
    rows = [make_row(i + 1, n) for i, n in enumerate(lengths)]
    batches = microbatches(rows, buckets=(16, 32, 64), microbatch_tokens=tokens, nominal_rows=nominal, shards=shards)
    shapes = {(rows_per_microbatch(b, tokens, nominal, shards), b) for b in (16, 32, 64)}
    found = []
    for batch in batches:
        assert batch.shape in shapes and batch.shape[0] % shards == 0
        for tokens_t, segments_t, trainable_t, advantage_t in zip(
            batch.tokens_bt, batch.segments_bt, batch.trainable_bt, batch.advantage_bt, strict=True
        ):
            n = int(segments_t.sum())
            assert not trainable_t[n:].any()
            if n:
                found.append((int(tokens_t[0]), n))
                assert (segments_t[:n] == 1).all() and (tokens_t[:n] == tokens_t[0]).all()
                assert advantage_t[0] == tokens_t[0]
                np.testing.assert_array_equal(trainable_t[:n], np.arange(n) % 2 == 1)
    assert sorted(found) == [(i + 1, n) for i, n in enumerate(lengths)]


def test_only_the_last_microbatch_holds_dead_rows():
    rows = [make_row(i + 1, n) for i, n in enumerate([10] * 5 + [20] * 2 + [60])]
    batches = microbatches(rows, buckets=(16, 32, 64), microbatch_tokens=64, nominal_rows=8)
    live = [(b.shape, int((b.segments_bt.sum(1) > 0).sum())) for b in batches]
    # 64 tokens are 4 rows of 16, 2 of 32 or 1 of 64; the fifth short row moves up
    assert live == [((4, 16), 4), ((2, 32), 2), ((1, 64), 1), ((1, 64), 1)]


def test_a_row_longer_than_the_last_bucket_is_an_error():
    with pytest.raises(UserError, match="65 tokens"):
        microbatches([make_row(1, 65)], buckets=(16, 64), microbatch_tokens=64, nominal_rows=1)


def test_a_trajectory_without_a_stop_token_trains_on_its_sampled_tokens_alone():
    trajectory = Trajectory(Problem("p", "q"), 0, [9, 9, 9])
    trajectory.append_sampled(Sampled((5, 6), (-0.1, -0.2), Finish.LENGTH), "")
    trajectory.close(Finish.LENGTH)
    (batch,) = microbatches([trajectory_row(trajectory, 1.5)], buckets=(8,), microbatch_tokens=8, nominal_rows=1)
    assert batch.trainable_bt[0].tolist() == [False, False, False, True, True, False, False, False]
    assert batch.segments_bt[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    np.testing.assert_allclose(batch.old_logp_bt[0, 3:5], [-0.1, -0.2])
    assert np.isnan(batch.old_logp_bt[0, :3]).all()
