"""Payloads decode to the same values on every device."""

import pytest

from tests.codecs.codec_examples import SPECS
from tests.gpu.all_codecs import compare
from tests.gpu.devices import on_devices_long, own_device
from tests.ranks import on_ranks


@on_devices_long
@pytest.mark.parametrize("spec", SPECS)
@on_ranks(1)  # a process that has used CUDA could not fork ranks for other tests
def test_a_device_decodes_to_the_values_of_the_cpu(spec: str, device: str) -> None:
    for n in (1, 127, 128, 4096, 1_000_003):
        compare(spec, n, own_device(device))
