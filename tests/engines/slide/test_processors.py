"""Updates have threads of their own, on the processors of their rank."""

import os

import torch

from shardlab.engines.slide.optimizer import update_workers
from tests.engines.slide.small_engine import engine_of, train
from tests.ranks import on_ranks


@on_ranks(1)
def test_as_many_threads_update_as_compute_on_a_cpu(group) -> None:
    assert update_workers(group, torch.device("cpu")) is None
    expected = train(engine_of(group, {"engine": "slide"}), 3)
    torch.set_num_threads(3)
    try:
        workers = update_workers(group, torch.device("cpu"))
        engine = engine_of(group, {"engine": "slide"})
    finally:
        torch.set_num_threads(1)
    assert workers.threads == 3
    assert set(workers.cpus) == os.sched_getaffinity(0)
    assert torch.equal(train(engine, 3), expected)
