"""Rows into microbatches: everything once, nothing across a border."""

import itertools
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rows import make_rows

from rstar_jax.training.batching import Row, microbatch_shapes, microbatches, pack
from rstar_jax.types import UserError


def row(length):
    return Row(np.full(length, length, np.int32), np.arange(length) > 0, np.zeros(length, np.float32), float(length))


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=200, deadline=None)
def test_packing_keeps_every_row_once_in_bins_that_are_full_enough(lengths):
    rows = [row(n) for n in lengths]
    bins = pack(rows, 20)
    assert sorted(id(r) for b in bins for r in b) == sorted(map(id, rows))
    used = [sum(map(len, b)) for b in bins]
    assert all(0 < n <= 20 for n in used)
    assert all(a + b > 20 for a, b in itertools.combinations(used, 2))  # no two bins would fit in one


@pytest.mark.parametrize("packing", [False, True])
def test_microbatches_hold_every_sequence_whole_with_its_own_positions(packing):
    rows = make_rows(20)
    settings = {"buckets": (16, 40), "microbatch_tokens": 120, "nominal_rows": 20}
    batches = microbatches(rows, **settings, packing=packing)
    found = []
    for batch in batches:
        assert batch.shape in microbatch_shapes(*settings.values(), 1, packing)
        for b in range(batch.shape[0]):
            segments = batch.segments_bt[b]
            assert not batch.trainable_bt[b, segments == 0].any()
            for number in range(1, segments.max() + 1):
                (here,) = np.nonzero(segments == number)
                assert np.array_equal(here, np.arange(here[0], here[0] + len(here)))
                np.testing.assert_array_equal(batch.positions_bt[b, here], np.arange(len(here)))
                found.append((batch.tokens_bt[b, here], batch.trainable_bt[b, here], batch.sampler_logp_bt[b, here]))
                assert len(set(batch.advantage_bt[b, here].tolist())) == 1
    assert packing == (max(batch.segments_bt.max() for batch in batches) > 1)
    by_content = lambda ids, *_: ids.tobytes()  # noqa: E731
    for got, sent in zip(sorted(found, key=lambda f: by_content(*f)), sorted(rows, key=lambda r: by_content(r.ids)), strict=True):
        np.testing.assert_array_equal(got[0], sent.ids)
        np.testing.assert_array_equal(got[1], sent.trainable)
        np.testing.assert_array_equal(got[2], sent.logps)


def test_a_trainable_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        Row(np.zeros(3, np.int32), np.ones(3, bool), np.zeros(3, np.float32))


def test_a_row_that_fits_no_bucket_is_refused():
    with pytest.raises(UserError, match="41 tokens is longer than the last"):
        microbatches([row(41)], buckets=(16, 40), microbatch_tokens=120, nominal_rows=1, packing=True)
