"""What holds for every kernel of a grouped format."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardlab.kernels import native
from tests.kernels.all_kernels import GROUPED, KEY
from tests.kernels.kernel_vectors import ALPHAS, any_bits, bits, vectors

GROUPS = st.sampled_from([8, 16, 128, 1000, 4096])
every_kernel = pytest.mark.parametrize("kernel", GROUPED.values(), ids=GROUPED)


@pytest.fixture(autouse=True)
def _compiled():
    if not native.available():
        pytest.skip("no compiled kernels")


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
@given(vectors(), GROUPS)
def test_encoding_equals_the_reference_bit_for_bit(kernel, x, group):
    check_encoding(kernel, x, group)


@every_kernel
@given(st.data(), GROUPS)
def test_encoding_with_residual_equals_the_reference_bit_for_bit(kernel, data, group):
    x = data.draw(vectors())
    check_residual(kernel, x, data.draw(vectors(n=len(x))), group)


@every_kernel
@given(st.integers(0, 2**31), st.integers(0, 600), GROUPS)
@example(seed=61029, n=221, group=8)  # a root that torch rounds the wrong way
def test_every_bit_pattern_encodes_as_the_reference_does(kernel, seed, n, group):
    x, residual = any_bits(n, seed), any_bits(n, seed + 1)
    check_encoding(kernel, x, group)
    # in a sum of two NaN the order of operands decides whose payload survives
    residual[x.isnan() & residual.isnan()] = 0.0
    check_residual(kernel, x, residual, group)


@every_kernel
@given(st.data(), GROUPS, ALPHAS)
def test_decoding_equals_the_reference_bit_for_bit(kernel, data, group, alpha):
    x = data.draw(vectors())
    out = data.draw(vectors(n=len(x)))
    expected = out.clone()
    payload = kernel.encode(x, group, KEY)
    kernel.decode_add(payload, group, out, alpha)
    kernel.decode_reference([payload], group, expected, alpha, True)
    assert bits(out) == bits(expected)


@every_kernel
@given(st.data(), st.integers(1, 9), GROUPS, ALPHAS)
def test_the_sum_of_payloads_equals_the_reference_bit_for_bit(kernel, data, count, group, alpha):
    first = data.draw(vectors())
    others = [data.draw(vectors(n=len(first))) for _ in range(count - 1)]
    payloads = [kernel.encode(x, group, KEY) for x in (first, *others)]
    out, expected = torch.full_like(first, 7.0), torch.empty_like(first)
    kernel.decode_sum(payloads, group, out, alpha)
    kernel.decode_reference(payloads, group, expected, alpha, False)
    assert bits(out) == bits(expected)


@every_kernel
def test_any_number_of_threads_makes_the_same_bytes(kernel):
    n = 300_001
    x, residual = torch.randn(n), torch.randn(n)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kept, out = torch.empty(n), torch.empty(n)
            payload = kernel.encode_residual(x, residual, kept, 128, KEY)
            kernel.decode_sum([payload, payload], 128, out, 0.5)
            results.append((payload.tolist(), bits(kept), bits(out)))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


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
def test_memory_that_does_not_fit_is_refused(kernel):
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
