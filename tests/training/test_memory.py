"""What the programs of an update need beside their arguments: XLA's own account of them, compiled and not run."""

import dataclasses

import pytest

from experiments.benchmarks.update_programs import Shapes, size
from rstar_jax.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=8192, num_layers=6, d_model=384, d_ff=1152, num_heads=6, num_kv_heads=2, head_dim=64, remat="full", logprob_chunk=256
)


def test_chunks_spare_the_logits_of_a_large_vocabulary():
    rows, length = 8, 512
    large = dataclasses.replace(MODEL, vocab_size=151_936)
    chunked = Shapes(large, rows, length).memory().temp_size_in_bytes
    everything = Shapes(dataclasses.replace(large, logprob_chunk=rows * length), rows, length).memory().temp_size_in_bytes
    assert everything >= 4 * rows * length * large.vocab_size  # all logits are there
    assert chunked <= 0.2 * everything


def test_temporaries_grow_with_the_rows_and_not_faster():
    once, twice, four = (Shapes(MODEL, rows, 512).memory().temp_size_in_bytes for rows in (4, 8, 16))
    assert 1.7 <= (four - twice) / (twice - once) <= 2.3  # what does not depend on the rows cancels


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_donated_is_written_in_place(remat):
    add, apply, state, so_far = Shapes(dataclasses.replace(MODEL, remat=remat), 2, 64).lower()
    assert add.compile().memory_analysis().alias_size_in_bytes >= 0.99 * size(so_far)
    assert apply.compile().memory_analysis().alias_size_in_bytes >= 0.99 * size(state)
