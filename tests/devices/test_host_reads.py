"""Values that a device computes stay there: no message makes the host wait for them."""

import json
import traceback
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.commands import ROOT, typed
from tests.devices.late_device import late_cpu
from tests.engines.engine_cases import LOSSY, STRATEGIES, make, train
from tests.ranks import on_ranks

READERS = {
    "threshold": "the number of values at or above the threshold",
}
"""codecs of which a read is known, and what they read"""


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reads by codec or collective and method, from a process of its own."""
    run = typed(tmp_path_factory.mktemp("reads"), ROOT, "tests.devices.reads")
    assert run.wait() == 0, run.said()
    found: dict[str, str] = json.loads(run.said().splitlines()[-1])
    return found


@pytest.mark.long
def test_no_codec_and_no_collective_reads_from_the_device(reads: dict[str, str]) -> None:
    others = {case: where for case, where in reads.items() if not case.startswith(tuple(READERS))}
    assert len(others) > 140
    assert {case: where for case, where in others.items() if where} == {}


@pytest.mark.long
@pytest.mark.parametrize("codec", READERS)
def test_a_known_read_is_found(reads: dict[str, str], codec: str) -> None:
    assert "DataDependent" in reads[f"{codec}.encode"] or "Dynamic" in reads[f"{codec}.encode"]


OF_HOST_MEMORY = {
    "clip_coefficient": "the norm, which was read",
    "_norm": "the sum of squares of gradients in host memory",
    "update": "numbers of steps in host memory, by which AdamW corrects its moments",
    "find_packed_sequence_indices": "transformers looks at the positions in every forward",
}
"""functions that look at numbers during a step, and what these are"""


class Readers(TorchDispatchMode):
    """Names of the functions of this thread that turn a tensor into a number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "_local_scalar_dense" in str(func):
            frames = traceback.extract_stack()
            own = [
                f for f in frames if "/shardlab/" in f.filename or "/transformers/" in f.filename
            ]
            self.names.add(own[-1].name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "manual", "slide-full-cpu", "ddp-int8"])
@on_ranks(2)
def test_a_step_reads_its_loss_and_norm_together_and_waits_for_nothing(
    group: dist.ProcessGroup, name: str
) -> None:
    with late_cpu() as device:
        engine = make(group, {**STRATEGIES, **LOSSY}[name])
        train(engine, group, 2)
        device.waits = 0
        with Readers() as readers:
            losses = train(engine, group, 1, first=2)
        assert losses.isfinite().all()
        assert readers.names <= OF_HOST_MEMORY.keys()
        # slide copies from host memory, and waits for the gradients that it updates it with
        assert (device.copies, device.waits) == (0, 0) or name.startswith("slide")
