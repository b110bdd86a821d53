import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data.loader import Batches, blocks
from shardlab.data.tokens import open_split
from tests.token_data import write_tokens

TOKENS = 1003


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Tokens 0 to 1002 in three shards, one of them empty."""
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, np.split(np.arange(TOKENS), [400, 400]), TOKENS)
    return open_split(folder, "train")


@st.composite
def divisions(draw, samples):
    """World size, accumulation and batch size that make up as many samples."""
    world_size = draw(st.sampled_from([n for n in range(1, samples + 1) if samples % n == 0]))
    per_rank = samples // world_size
    accumulation = draw(st.sampled_from([n for n in range(1, per_rank + 1) if per_rank % n == 0]))
    return world_size, accumulation, per_rank // accumulation


@given(data=st.data(), seed=st.integers(0, 2**31 - 1), samples=st.sampled_from([1, 6, 8, 12]))
def test_samples_do_not_depend_on_world_size_or_resumption(split, data, seed, samples):
    steps = data.draw(st.integers(1, 12))
    expected = Batches(split, 16, seed).batch(0, steps * samples)
    batches = []
    first = 0
    while first < steps:  # every resume may be on other ranks
        world_size, accumulation, size = data.draw(divisions(samples))
        last = data.draw(st.integers(first + 1, steps))
        readers = [Batches(split, 16, seed) for _ in range(world_size)]
        for step in range(first, last):
            by_rank = [
                reader.micro_batches(step * samples, rank, world_size, accumulation, size)
                for rank, reader in enumerate(readers)
            ]
            batches += [batch for micro in zip(*by_rank, strict=True) for batch in micro]
        first = last
    assert torch.equal(torch.cat(batches), expected)


@given(st.integers(0, 2**31 - 1), st.integers(0, 5), st.sampled_from([1, 7, 16, 1002]))
def test_each_epoch_predicts_every_token_once(split, seed, epoch, length):
    batches = Batches(split, length, seed)
    count = batches.samples_per_epoch
    samples = batches.batch(epoch * count, count)
    assert torch.equal(samples, samples[:, :1] + torch.arange(length + 1))
    assert samples[:, 1:].flatten().sort().values.tolist() == list(range(1, count * length + 1))


def test_order_differs_between_seeds_and_epochs(split):
    batches = Batches(split, 16, 0)
    count = batches.samples_per_epoch
    first = batches.batch(0, count)
    assert not torch.equal(first, batches.batch(count, count))
    assert not torch.equal(first, Batches(split, 16, 1).batch(0, count))
    assert not torch.equal(first, first.sort(dim=0).values)


def test_order_is_stable_between_versions(split):
    assert Batches(split, 100, 7).batch(8, 4)[:, 0].tolist() == [900, 0, 300, 900]


def test_a_split_shorter_than_a_block_is_refused(split):
    assert Batches(split, TOKENS - 1, 0).samples_per_epoch == 1
    with pytest.raises(
        UserError, match=r"1003 tokens, fewer than train\.sequence_length 1003 \+ 1"
    ):
        Batches(split, TOKENS, 0)


@given(st.integers(1, 1100), st.integers(1, 9))
def test_evaluation_predicts_every_token_but_the_first_once_in_order(split, length, batch):
    tensors = list(blocks(split, length, batch))
    targets = torch.cat([tensor[:, 1:].flatten() for tensor in tensors])
    assert targets.tolist() == list(range(1, TOKENS))
    inputs = torch.cat([tensor[:, :-1].flatten() for tensor in tensors])
    assert torch.equal(inputs + 1, targets)
    assert all(len(t) <= batch and t.shape[1] == length + 1 for t in tensors[:-1])
