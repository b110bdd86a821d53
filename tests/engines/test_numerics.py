"""Narrow types, the loss scale, and the global norm of gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardlab.core.errors import UserError
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.numerics import LossScale, norm_of, sum_of_squares
from shardlab.models.units import dtype_of
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.engines.engine_cases import losses_of, make, train
from tests.ranks import on_ranks, run_ranks
from tests.whole_parameters import whole_parameters

AUTO = {"param_dtype": "auto"}
SHARDED = [name for name, traits in ENGINES.items() if traits.residency == "sharded"]
BF16 = {"param_dtype": "bf16"}
REDUCED = {**BF16, "reduce_dtype": "bf16"}
MIXED = {**BF16, "overrides": [{"layers": 1, "param_dtype": "fp32"}]}
INT8 = {"gradients": {"codec": "int8:group=64"}, "weights": {"codec": "int8:group=64"}}
SLIDE = {"engine": "slide", "param_transfer": "shard"}
NARROW = {
    **{f"{engine}-bf16": {"engine": engine, **BF16} for engine in ENGINES},
    "fsdp2-fp16": {"engine": "fsdp2", "param_dtype": "fp16"},
    "slide-fp16": {**SLIDE, "param_dtype": "fp16"},
    "slide-reduced": {**SLIDE, **REDUCED, "grad_sync": "gpu_reduce"},
    "fsdp2-mixed": {"engine": "fsdp2", **MIXED},
    "manual-mixed": {"engine": "manual", **MIXED},
    "fsdp2-wide-output": {"engine": "fsdp2", **BF16, "output_dtype": "fp32"},
    "manual-compressed": {"engine": "manual", "param_dtype": "fp16", **INT8},
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_types_follow_the_curve_of_float32(name):
    def on_rank(group):
        engine = make(group, NARROW[name])
        losses = train(engine, group, 3)
        full = whole_parameters(engine).values()
        assert all(p.dtype == torch.float32 for p in full)
        return {"losses": losses, "sum": torch.stack([p.double().sum() for p in full])}

    ranks = run_ranks(2, on_rank)
    assert torch.equal(ranks[0]["sum"], ranks[1]["sum"])
    losses = (ranks[0]["losses"] + ranks[1]["losses"]) / 2
    # three significant digits of bf16, over three steps
    torch.testing.assert_close(losses, losses_of("ddp", 2), rtol=0.01, atol=0)
    assert not torch.equal(losses, losses_of("ddp", 2))


@pytest.mark.parametrize("engine", [*SHARDED, "slide"])
@on_ranks(2)
def test_gathers_of_narrow_types_move_half_of_the_bytes(group, engine) -> None:
    moved = []
    for dtype in ("fp32", "bf16"):
        made = make(group, {"engine": engine, "param_dtype": dtype})
        train(made, group, 1)
        made.shards()  # waits for what is fetched for the next step, which counts
        moved.append(made.ledger.summary()["weights"]["bytes_raw"])
    wide, narrow = moved
    assert narrow == wide / 2 > 0


@given(st.lists(st.booleans(), max_size=40))
def test_the_scale_halves_with_every_overflow_and_stays_a_power_of_two(steps):
    scale = LossScale(active=True)
    for finite in steps:
        scale.update(finite)
    assert scale.value == max(1.0, 2.0 ** (16 - steps.count(False)))


def test_loss_scale_doubles_after_2000_finite_steps_and_resumes():
    scale, other = LossScale(active=True), LossScale(active=True)
    for _ in range(1999):
        scale.update(finite=True)
    other.load_state_dict(scale.state_dict())
    other.update(finite=True)
    assert (scale.value, other.value) == (2.0**16, 2.0**17)


def test_an_overflow_begins_the_2000_steps_anew():
    scale = LossScale(active=True)
    values = []
    for finite in [*[True] * 1999, False, *[True] * 2000]:
        scale.update(finite)
        values.append(scale.value)
    assert values == [2.0**16] * 1999 + [2.0**15] * 2000 + [2.0**16]


def test_without_fp16_nothing_is_scaled_or_saved():
    scale = LossScale(active=False)
    scale.update(finite=False)
    assert scale.value == 1.0 and scale.state_dict() == {}


NARROW_ALONE = torch.device("cuda")
"""here it stands for a GPU that is made for fp16 and not for bf16, as torch says of none at all"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this GPU may be made for bf16")
@on_ranks(1)
def test_error_feedback_is_refused_where_auto_is_fp16(group) -> None:
    assert dtype_of("auto", NARROW_ALONE) is torch.float16
    gradients = {"codec": "int8", "error_feedback": True}
    optimization = Optimization()
    for narrow in (AUTO, {"overrides": [{"layers": 0, **AUTO}]}):
        strategy = parse_strategy({"engine": "fsdp2", "gradients": gradients, **narrow})
        with pytest.raises(UserError, match="auto is fp16 on this device: set param_dtype"):
            build_engine(nn.Linear(2, 2), strategy, optimization, group, device=NARROW_ALONE)


def test_auto_is_float32_on_a_cpu():
    assert dtype_of("auto", torch.device("cpu")) is torch.float32


def norm(gradients):
    return norm_of(float(sum_of_squares(gradients)))


def exact(values):
    """The norm in float32: squares of float32 have no error in float64, and `fsum` adds none."""
    squares = math.fsum((values.double() ** 2).flatten().tolist())
    return float(torch.tensor(math.sqrt(squares), dtype=torch.float32))


@given(
    st.integers(0, 70_000),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 70_000), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_norm_does_not_depend_on_cuts(n, seed, cuts, dtype):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 4, (n,), generator=generator)
    values = (torch.randn(n, generator=generator) * 2.0**powers).to(dtype)
    parts = list(values.tensor_split(sorted(min(cut, n) for cut in cuts)))
    assert norm(parts) == exact(values)


@pytest.mark.parametrize("size", [2, 20_000])
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_elements_make_the_norm_nonfinite(bad, size):
    gradients = [torch.ones(20_000), torch.ones(9), torch.full((size,), float(bad))]
    assert str(norm(gradients)) == bad
