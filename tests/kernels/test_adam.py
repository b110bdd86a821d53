"""Adam in one pass: the bits of the reference and of torch, stochastic rounding, squared norms."""

import itertools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.adam import Hyper, adam_, sum_of_squares
from shardlab.kernels.workers import Workers
from tests.codecs.vectors import any_bits, bits, default_dtype, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DECAYING = Hyper(1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """Arguments of `adam_`, with the values of its vectors drawn from the seed."""

    n: int
    seed: int = 0
    wild: bool = False
    """any bits, not normal numbers"""
    dtypes: tuple[torch.dtype, ...] = (FP32, FP32, FP32, FP32)
    """Types of the parameter, its moments and the gradients."""
    ranks: int = 1
    mirror: torch.dtype | None = None
    hyper: Hyper = DECAYING
    step: int = 3
    scale: float = 1.0
    offset: int = 0
    shift: int = 0
    """elements by which all vectors are off their alignment"""

    def vectors(self) -> list[Tensor]:
        """Return parameter, moments, gradients and mirror."""
        generator = torch.Generator().manual_seed(self.seed)
        kinds = [*self.dtypes[:3], *[self.dtypes[3]] * self.ranks, self.mirror or FP32]
        vectors = []
        for index, dtype in enumerate(kinds):
            values = torch.randn(self.n, generator=generator)
            if self.wild:
                values = any_bits(self.n, self.seed + index)
            if index == 2:
                values = values.abs()
            padded = torch.zeros(self.n + self.shift + index, dtype=dtype)
            padded[self.shift + index :] = values
            vectors.append(padded[self.shift + index :])
        return vectors


def stepped(
    case: Case, workers: Workers | None = None, cuts: list[int] | None = None
) -> list[list[int]]:
    """Bits of all vectors after the step, made in calls for the parts between the cuts."""
    *vectors, mirror = case.vectors()
    has_mirror = case.mirror is not None and case.dtypes[0] is FP32
    ends = sorted({0, case.n, *(min(cut, case.n) for cut in cuts or [])})
    for start, stop in itertools.pairwise(ends):
        parameter, first, second, *gradients = (vector[start:stop] for vector in vectors)
        adam_(
            *(parameter, first, second, gradients, case.hyper, case.step, case.scale),
            mirror=mirror[start:stop] if has_mirror else None,
            seed=case.seed,
            offset=case.offset + start,
            workers=workers,
        )
    return [bits(vector) for vector in (*vectors, mirror)]


CASES = st.builds(
    Case,
    n=st.integers(0, 129),
    seed=st.integers(0, 2**31),
    wild=st.booleans(),
    dtypes=st.tuples(
        st.sampled_from([FP32, BF16, FP16]),
        st.sampled_from([FP32, BF16]),
        st.sampled_from([FP32, BF16]),
        st.sampled_from([FP32, BF16, FP16]),
    ),
    ranks=st.integers(1, 4),
    mirror=st.sampled_from([None, BF16, FP16]),
    hyper=st.builds(
        Hyper,
        st.sampled_from([1e-3, 0.3]),
        st.sampled_from([(0.9, 0.999), (0.5, 0.3), (0.2, 0.0)]),
        st.sampled_from([1e-8, 0.0]),
        st.sampled_from([0.0, 0.1]),
        st.booleans(),
    ),
    step=st.integers(1, 10**6),
    scale=st.sampled_from([1.0, -0.25, 1 / 3]),
    offset=st.sampled_from([0, 5, 2**32 - 40, 2**40 + 3]),
    shift=st.integers(0, 9),
)


@given(CASES, st.lists(st.integers(0, 129), max_size=3))
def test_the_kernel_has_the_bits_of_the_reference_and_cuts_change_none(case, cuts):
    with reference():
        expected = stepped(case)
    assert stepped(case) == expected
    assert stepped(case, cuts=cuts) == expected


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_step_does_not_depend_on_the_number_of_threads(dtype):
    case = Case(n=200_003, dtypes=(dtype,) * 4, mirror=BF16, offset=2**32 - 100_001)
    expected = stepped(case)
    assert all(stepped(case, Workers(threads)) == expected for threads in (1, 2, 3))


@pytest.mark.skipif(not native.available(), reason="PyTorch itself flushes where it is set to")
@pytest.mark.parametrize("threads", [None, 2])
def test_flushing_of_subnormal_numbers_has_no_effect(threads):
    case = Case(n=1000, wild=True, mirror=BF16)
    expected = stepped(case)
    assert torch.set_flush_denormal(True)
    try:
        assert stepped(case, workers=Workers(threads) if threads else None) == expected
    finally:
        torch.set_flush_denormal(False)


SETTINGS = [(True, 0.1, (0.9, 0.999)), (True, 0.0, (0.4, 0.3)), (False, 0.1, (0.9, 0.95))]


def torch_and_kernel(n, steps, decoupled, decay, betas):
    """Return pairs of parameter and moments, by torch's fused optimizer and by the kernel."""
    torch.manual_seed(n)
    parameter = torch.randn(n)
    parameter_of_torch = torch.nn.Parameter(parameter.clone())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [parameter_of_torch], 1e-3, betas, weight_decay=decay, fused=True
    )
    vectors = parameter, torch.zeros(n), torch.zeros(n)
    hyper = Hyper(1e-3, betas, 1e-8, decay, decoupled)
    for step in range(1, steps + 1):
        parameter_of_torch.grad = torch.randn(n) * 10.0 ** torch.randint(-8, 2, (n,))
        adam_(*vectors, [parameter_of_torch.grad], hyper, step)
        optimizer.step()
    state = optimizer.state[parameter_of_torch]
    return zip(
        (parameter_of_torch.detach(), state["exp_avg"], state["exp_avg_sq"]), vectors, strict=True
    )


as_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch rounds differently on this processor",
)


@as_torch
@pytest.mark.parametrize(("decoupled", "decay", "betas"), SETTINGS)
def test_hundred_steps_match_fused_torch_optimizer_bit_for_bit(decoupled, decay, betas):
    for expected, result in torch_and_kernel(16 * 200, 100, decoupled, decay, betas):
        assert torch.equal(expected, result)


@as_torch
def test_tail_differs_from_torch_by_at_most_two_units():
    for n in range(1, 16):
        for expected, result in torch_and_kernel(n, 1, True, 0.1, (0.9, 0.999)):
            assert (expected.view(torch.int32) - result.view(torch.int32)).abs().max() <= 2


def drawn(value, dtype, seed=0, step=1):
    """A parameter of float16 a 3000th above the value, or a second moment that decays from it."""
    n = 1 << 20
    zeros = torch.zeros(n)
    if dtype is FP16:
        parameter = torch.full((n,), value, dtype=FP16)
        push = torch.full((n,), -1.0)  # the step is learning_rate * sign
        hyper = Hyper(abs(value) / 3000, eps=0.0)
        adam_(parameter, zeros, zeros.clone(), [push], hyper, step, seed=seed)
        return parameter
    second = torch.full((n,), value, dtype=dtype)
    adam_(zeros.clone(), zeros, second, [zeros], Hyper(0.0), step, seed=seed)
    return second


@pytest.mark.parametrize(
    ("value", "dtype"), [(1.0, BF16), (3e-39, BF16), (2.5, FP16), (3e-6, FP16)]
)
def test_stochastic_rounding_is_unbiased(value, dtype):
    rounded = drawn(value, dtype).double()
    exact = 1 + 1 / 3000 if dtype is FP16 else 0.999
    exact *= torch.tensor(value, dtype=dtype).double().item()
    assert len(rounded.unique()) == 2
    deviation = rounded.std().item() / math.sqrt(len(rounded))
    # the step itself is rounded in float32
    assert abs(rounded.mean().item() - exact) < 4 * deviation + 1e-6 * exact


def test_stochastic_rounding_depends_on_seed_step_and_element():
    first = drawn(1.0, BF16)
    assert torch.equal(first, drawn(1.0, BF16))
    for other in (drawn(1.0, BF16, seed=1), drawn(1.0, BF16, step=2)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "exp_avg_sq",
            torch.zeros(8, dtype=FP16),
            "exp_avg_sq must be .* torch.float32 or",
        ),
        ("exp_avg", torch.zeros(9), "exp_avg must be a contiguous vector of 8"),
        ("parameter", torch.zeros(16)[::2], "parameter must be a contiguous vector"),
        ("gradients", [torch.zeros(8), torch.zeros(8, dtype=BF16)], "all of one dtype"),
        ("gradients", [], "at least one"),
        ("mirror", torch.zeros(8), "mirror must be .* torch.bfloat16 or torch.float16"),
        ("step", 0, "step is 0"),
    ],
)
def test_unsuitable_arguments_are_refused(name, value, message):
    arguments = dict(zip(("parameter", "exp_avg", "exp_avg_sq"), torch.zeros(3, 8), strict=True))
    arguments |= {"gradients": [torch.zeros(8)], "hyper": Hyper(1e-3), "step": 1} | {name: value}
    with pytest.raises(ValueError, match=message):
        adam_(**arguments)


@given(
    st.integers(0, 40_000),
    st.sampled_from([FP32, BF16, FP16]),
    st.integers(0, 40_000),
    st.integers(1, 3),
)
def test_sum_of_squares_matches_reference_on_any_number_of_threads(n, dtype, offset, ranks):
    vectors = [any_bits(n, seed).nan_to_num().clamp(-1e4, 1e4).to(dtype) for seed in range(ranks)]
    squares = sum_of_squares(vectors, 1 / 3, offset)
    assert sum_of_squares(vectors, 1 / 3, offset, Workers(2)) == squares
    with reference():
        assert sum_of_squares(vectors, 1 / 3, offset) == squares
    total = sum(vector.double() for vector in vectors) / 3
    assert squares == pytest.approx(float(total @ total), rel=1e-5)


@given(st.integers(0, 16_383), st.integers(0, 16_384))
def test_sum_of_squares_of_a_block_does_not_depend_on_zeros(start, length):
    block = torch.zeros(16_384)
    part = block[start : start + length]
    part.copy_(any_bits(len(part), 3).nan_to_num().clamp(-1e9, 1e9))
    assert sum_of_squares([part], offset=start + 5 * 16_384) == sum_of_squares([block])


def test_sum_of_squares_propagates_nan_and_infinity():
    for value, expected in ((float("-inf"), "inf"), (float("nan"), "nan")):
        assert str(sum_of_squares([torch.tensor([1.0, value] * 9)])) == expected
    assert sum_of_squares([torch.zeros(0)]) == 0.0


POOLED = Case(n=100_003)


def test_pool_serves_concurrent_callers():
    expected, workers = stepped(POOLED), Workers(2)
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda _: stepped(POOLED, workers) == expected, range(20)))


def test_forked_process_starts_its_own_threads():
    expected, workers = stepped(POOLED), Workers(2)
    stepped(POOLED, workers)
    # forked while a caller uses the pool
    stop = threading.Event()

    def run_steps():
        while not stop.is_set():
            stepped(POOLED, workers)

    caller = threading.Thread(target=run_steps)
    caller.start()
    children = []
    for _ in range(5):
        children.append(os.fork())
        if not children[-1]:
            is_equal = stepped(POOLED, workers) == expected
            workers.close()
            os._exit(0 if is_equal else 1)
    stop.set()
    caller.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    assert stepped(POOLED, workers) == expected


@pytest.mark.parametrize(("count", "cpus"), [(0, None), (1, []), (1, [100_000])])
def test_impossible_threads_are_refused(count, cpus):
    with pytest.raises(ValueError, match="workers: "):
        Workers(count, cpus)


@pytest.mark.parametrize("narrow", [BF16, FP16])
@pytest.mark.parametrize("dtype", [BF16, torch.float64])
def test_updates_do_not_depend_on_the_default_dtype(narrow, dtype):
    drawn = torch.randn(4, 3001, generator=torch.Generator().manual_seed(1))

    def updated():
        parameter, first, second, gradient = drawn.clone()
        vectors = [parameter.to(narrow), first.to(BF16), second.abs()]
        adam_(*vectors, [gradient.to(narrow)], DECAYING, 3)
        return [bits(vector) for vector in vectors]

    expected = updated()
    with reference(), default_dtype(dtype):
        assert updated() == expected
