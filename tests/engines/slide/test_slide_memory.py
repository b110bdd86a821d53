"""Device and host memory of the slide engine against the closed forms."""

from collections import deque
from collections.abc import Mapping

import pytest
import torch

from shardlab.config.schema import Train
from shardlab.config.strategy import parse_strategy
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.models.memory_step import closed_form, host_memory
from shardlab.models.unit_sizes import sizes_of
from shardlab.train.utilization import MemoryMeter
from tests.deep_models import deep_model, engine_of, keep_no_freed_memory
from tests.engines.small_engine import MODES
from tests.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
NARROW = 128
"""of models whose memory is laid out, not measured"""
TRAIN = Train(batch_size=2, sequence_length=16)
EVERY = {f"{name}-every": {**MODES[name], "reduce_every_micro_batch": True} for name in MODES}


def formulas(model, document, world_size, train=TRAIN):
    strategy = parse_strategy(document)
    given = strategy, sizes_of(model, strategy, train, CPU), world_size
    return closed_form(*given), host_memory(*given)


def partly_frozen(*shape):
    """Half of the blocks are frozen, and half of what is in the others."""
    model = deep_model(*shape)
    model.transformer.wte.requires_grad_(False)
    for number, block in enumerate(model.transformer.h):
        frozen = number < len(model.transformer.h) // 2
        (block if frozen else block.attn).requires_grad_(False)
    return model


def grown(document, make):
    """Memory by which a single rank grows, over the closed form."""

    def on_rank(group):
        keep_no_freed_memory()
        meter = MemoryMeter(CPU)
        model = make()
        device, main = formulas(model, document, 1)
        engine = engine_of(model, document, group, accumulation=1)
        for _ in range(2):
            engine.step([torch.randint(512, (2, 17))], 1e-3)
        engine.synchronize()
        growth = meter.used().memory_growth_bytes
        expected = sum(device.values()) + sum(main.values())
        return {"ratio": torch.tensor(growth / expected)}

    return float(run_ranks(1, on_rank, clean_heap=True)[0]["ratio"])


# every pair of settings
@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "dtype", "make"),
    [
        ("memory", "fp32", deep_model),
        ("memory", "bf16", partly_frozen),
        ("disk", "fp32", partly_frozen),
        ("disk", "bf16", deep_model),
    ],
)
def test_memory_growth_of_a_single_rank_matches_the_closed_form(
    monkeypatch, tmp_path, place, dtype, make
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    document = {"engine": "slide", "moments": place, "moment_dtype": dtype}
    assert 0.9 < grown(document, make) < 1.15


# every pair of settings: what one model leaves out, the other has
LAYOUTS = [
    (deep_model, [("fp32", None, 1), ("fp32", 1.0, 4), ("bf16", None, 4), ("bf16", 1.0, 1)]),
    (partly_frozen, [("fp32", None, 4), ("fp32", 1.0, 1), ("bf16", None, 1), ("bf16", 1.0, 4)]),
]


@pytest.mark.parametrize(("make", "settings"), LAYOUTS)
@pytest.mark.parametrize("mode", ["full-cpu_reduce", "full-gpu_reduce", "full-cpu_reduce-every"])
@on_ranks(2)
def test_host_memory_layout_matches_the_closed_form(group, mode, make, settings) -> None:
    for dtype, clip, count in settings:
        document, model = {**(MODES | EVERY)[mode], "param_dtype": dtype}, make(4, NARROW)
        train = TRAIN.model_copy(update={"clip": clip, "accumulation": count})
        _, main = formulas(model, document, 2, train)
        engine = engine_of(model, document, group, clip, count)
        taken = sum(map(len, engine._memory._places.values()))
        assert taken / 2 == pytest.approx(sum(main.values()), rel=1e-4)


def tensors_of(*parts):
    """All that lie in the attributes of objects, each by its address."""
    found, left = {}, [*parts]
    while left:
        part = left.pop()
        if isinstance(part, torch.Tensor):
            found[part.data_ptr()] = part
        elif isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple | deque):
            left += part
    return [*found.values()]


def allocated(layers, clip, mode):
    """Bytes for gradients in host memory, for all ranks, and for parameters and gradients that a
    rank has on the device, after two steps."""

    def on_rank(group):
        engine = engine_of(deep_model(layers, NARROW), MODES[mode], group, clip, accumulation=1)
        for _ in range(2):
            engine.step([torch.randint(512, (1, 17))], 1e-3)
        engine.synchronize()
        regions = engine._memory._places.items()
        gradients = [place for name, place in regions if "gradient" in name]
        schedule = engine._schedule
        vectors, window = schedule._offload._vectors, schedule.window
        device = tensors_of(schedule._vector, vars(window), vars(vectors))
        sizes = sum(map(len, gradients)), sum(tensor.nbytes for tensor in device)
        return {"sizes": torch.tensor(sizes)}

    return run_ranks(2, on_rank)[0]["sizes"].tolist()


@pytest.mark.parametrize(
    "mode", [pytest.param("full-cpu_reduce", marks=pytest.mark.long), "full-gpu_reduce"]
)
def test_device_memory_and_unheld_gradients_do_not_grow_with_layers(mode):
    few, many = (allocated(layers, None, mode) for layers in (4, 8))
    assert few == many and min(few) > 0
    (few_kept, few_device), (many_kept, many_device) = (
        allocated(layers, 1.0, mode) for layers in (4, 8)
    )
    assert many_kept > 1.8 * few_kept  # all wait for the norm
    assert many_device == few_device == few[1]
