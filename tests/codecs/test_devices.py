"""Payloads decode to the same values on every device."""

import pytest
import torch

from tests.codecs.codec_examples import SPECS
from tests.gpu.all_codecs import compare
from tests.ranks import on_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 127, 128, 4096, 1_000_003])
@pytest.mark.parametrize("spec", SPECS)
@on_ranks(1)  # a process that has used CUDA could not fork ranks for other tests
def test_gpu_decodes_to_the_values_of_the_cpu(spec: str, n: int) -> None:
    compare(spec, n, torch.device("cuda"))
