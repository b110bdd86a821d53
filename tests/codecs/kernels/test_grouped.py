"""Laws of every kernel of a grouped format."""

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.codecs.kernels.all_kernels import GROUPED, KEY, SIGNS
from tests.codecs.kernels.kernel_vectors import (
    ALPHAS,
    GROUPS,
    any_bits,
    bits,
    check_thread_counts,
    needs_compiled,
    vectors,
)

pytestmark = needs_compiled
every_kernel = pytest.mark.parametrize("kernel", GROUPED.values(), ids=GROUPED)


def new_payload(kernel, n, group):
    return torch.zeros(kernel.payload_bytes(n, group), dtype=torch.uint8)


def check_encoding(kernel, x, group):
    expected = new_payload(kernel, len(x), group)
    kernel.encode_reference(x, None, None, group, *KEY, expected)
    assert kernel.encode(x, group, KEY).tolist() == expected.tolist()


def check_residual(kernel, x, residual, group):
    expected, kept_expected = new_payload(kernel, len(x), group), torch.empty(len(x))
    kernel.encode_reference(x, residual, kept_expected, group, *KEY, expected)
    kept = torch.empty(len(x))
    assert kernel.encode_residual(x, residual, kept, group, KEY).tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)
    assert kernel.encode_residual(x, residual, residual, group, KEY).tolist() == expected.tolist()
    assert bits(residual) == bits(kept_expected)


@every_kernel
@given(st.data(), GROUPS)
def test_encode_matches_reference(kernel, data, group):
    x = data.draw(vectors())
    check_encoding(kernel, x, group)
    check_residual(kernel, x, data.draw(vectors(n=len(x))), group)


@every_kernel
@given(st.integers(0, 2**31), st.integers(0, 600), GROUPS)
@example(seed=61029, n=221, group=8)  # a square root that torch rounds incorrectly
def test_encode_matches_reference_for_any_bit_pattern(kernel, seed, n, group):
    x, residual = any_bits(n, seed), any_bits(n, seed + 1)
    check_encoding(kernel, x, group)
    # the payload of a sum of two NaN depends on the order of operands
    residual[x.isnan() & residual.isnan()] = 0.0
    check_residual(kernel, x, residual, group)


@every_kernel
@given(st.data(), st.integers(1, 9), GROUPS, ALPHAS)
def test_decode_matches_reference(kernel, data, count, group, alpha):
    first = data.draw(vectors())
    others = [data.draw(vectors(n=len(first))) for _ in range(count - 1)]
    payloads = [kernel.encode(x, group, KEY) for x in (first, *others)]
    out, expected = torch.full_like(first, 7.0), torch.empty_like(first)
    kernel.decode_sum(payloads, group, out, alpha)
    kernel.decode_reference(payloads, group, expected, alpha, False)
    assert bits(out) == bits(expected)
    expected = out.copy_(data.draw(vectors(n=len(first)))).clone()
    kernel.decode_add(payloads[0], group, out, alpha)
    kernel.decode_reference(payloads[:1], group, expected, alpha, True)
    assert bits(out) == bits(expected)


@every_kernel
def test_payloads_do_not_depend_on_the_number_of_threads(kernel):
    n = 300_001
    x, residual = torch.randn(n), torch.randn(n)

    def compute():
        kept, out = torch.empty(n), torch.empty(n)
        payload = kernel.encode_residual(x, residual, kept, 128, KEY)
        kernel.decode_sum([payload, payload], 128, out, 0.5)
        return payload, kept, out

    check_thread_counts(compute)


@pytest.mark.parametrize("name", ["int8", "int4", "bf16", "natural", "e4m3", "e5m2"])
@given(data=st.data(), group=GROUPS)
def test_payload_and_residual_sum_to_the_input_exactly(name, data, group):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted, sent = x + kept, torch.zeros(len(x))
    assume(bool((wanted.abs() < 2.0**126).all()))
    GROUPED[name].decode_add(GROUPED[name].encode_residual(x, kept, kept, group), group, sent)
    assert bits(sent + kept) == bits(wanted + 0.0)


HUGE = [2.0**127, -3e38]
"""too large for a scale, but not for a mean"""


@pytest.mark.parametrize("name", [name for name in GROUPED if GROUPED[name].format.head_bytes])
def test_group_with_a_non_finite_value_decodes_to_nan(name):
    kernel = GROUPED[name]
    for bad in (float("nan"), float("inf"), -float("inf"), *([] if name in SIGNS else HUGE)):
        x, kept, out = torch.ones(24), torch.full((24,), 0.25), torch.zeros(24)
        x[9] = bad
        kernel.decode_add(kernel.encode_residual(x, kept, kept, 8, KEY), 8, out)
        assert out[8:16].isnan().all()
        assert out[:8].isfinite().all() and out[16:].isfinite().all()
        assert kept[8:16].tolist() == [0.25] * 8


@every_kernel
def test_payloads_may_start_at_odd_addresses(kernel):
    x = torch.randn(77)
    message = torch.zeros(1 + kernel.payload_bytes(77, 16), dtype=torch.uint8)
    kernel.encode(x, 16, KEY, message[1:])
    assert torch.equal(message[1:], kernel.encode(x, 16, KEY))
    out, expected = torch.zeros(77), torch.zeros(77)
    kernel.decode_add(message[1:], 16, out)
    kernel.decode_add(message[1:].clone(), 16, expected)
    assert bits(out) == bits(expected)


@every_kernel
def test_unsuitable_tensors_are_refused(kernel):
    size = kernel.payload_bytes(16, 8)
    good, payload = torch.zeros(16), torch.zeros(size, dtype=torch.uint8)
    for x, group, target in (
        (torch.zeros(16, dtype=torch.float64), 8, payload),
        (torch.zeros(32)[::2], 8, payload),
        (good, 8, payload[1:]),
        (good, 8, torch.zeros(size)),
        (good, 12, payload),
        (good, 8192, payload),
    ):
        with pytest.raises(ValueError, match="must be"):
            kernel.encode(x, group, KEY, target)
        with pytest.raises(ValueError, match="must be"):
            kernel.decode_add(target, group, x)
    with pytest.raises(ValueError, match="must have the length"):
        kernel.encode_residual(good, torch.zeros(15), torch.zeros(16), 8)
