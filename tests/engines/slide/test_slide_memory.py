"""What the slide engine takes of the device and of main memory is what the formulas say."""

import pytest
import torch
from deep_models import deep_model, engine_of, keep_no_freed_memory
from ranks import run_ranks

from shardlab.core.memory import closed_form, main_memory
from shardlab.core.params import Train
from shardlab.core.strategy import parse_strategy
from shardlab.engines.activations.checkpoint import FOLDER_VARIABLE
from shardlab.engines.sizes import sizes_of
from shardlab.train.memory import MemoryMeter
from tests.engines.slide.sliding import MODES

CPU = torch.device("cpu")
TRAIN = Train(batch_size=8, sequence_length=16)


def formulas(model, document, world_size):
    strategy = parse_strategy(document)
    given = strategy, sizes_of(model, strategy, TRAIN, CPU), world_size
    return closed_form(*given), main_memory(*given)


def grown(document):
    """What a rank that is alone grows by, over the closed form."""

    def on_rank(group):
        keep_no_freed_memory()
        meter = MemoryMeter(CPU)
        model = deep_model()
        device, main = formulas(model, document, 1)
        engine = engine_of(model, document, group)
        for _ in range(2):
            engine.step([torch.randint(512, (8, 17))], 1e-3)
        engine.synchronize()
        growth = meter.used().memory_growth_bytes
        expected = sum(device.values()) + sum(main.values())
        return {"ratio": torch.tensor(growth / expected)}

    return float(run_ranks(1, on_rank)[0]["ratio"])


def test_a_rank_that_is_alone_grows_by_what_the_closed_form_says():
    assert 0.9 < grown({"engine": "slide"}) < 1.15


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_main_memory_is_laid_out_by_the_closed_form(mode, dtype):
    document = {**MODES[mode], "param_dtype": dtype}

    def on_rank(group):
        model = deep_model()
        _, main = formulas(model, document, 2)
        engine = engine_of(model, document, group)
        taken = sum(
            size
            for unit in engine.units
            for size in (unit.layout() | unit.moments_layout()).values()
        )
        return {"ratio": torch.tensor(taken / 2 / sum(main.values()))}

    assert float(run_ranks(2, on_rank)[0]["ratio"]) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_narrow_moments_and_those_on_disk_leave_memory(monkeypatch, tmp_path, place, dtype):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ratio = grown({"engine": "slide", "moments": place, "moment_dtype": dtype})
    assert 0.9 < ratio < 1.15


def test_the_device_needs_no_more_for_more_layers():
    model = deep_model()
    few, many = ({"engine": "slide", "wrap_size": size} for size in (8, 1))
    held = [formulas(model, each, 1)[0]["gathered"] for each in (few, many)]
    assert held[0] > 7 * held[1]
