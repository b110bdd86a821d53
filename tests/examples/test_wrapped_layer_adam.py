"""Under the wrappers of Accelerate and Lightning Fabric, LayerAdam is as torch's AdamW."""

import pytest
import torch

from tests.examples.scripts import on_two_ranks


@pytest.mark.long
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch rounds otherwise on this processor",
)
@pytest.mark.parametrize(
    ("name", "needed"), [("accelerate", "accelerate"), ("fabric", "lightning_fabric")]
)
def test_sharded_training_by_other_libraries_has_the_bits_of_torchs_fused_optimizer(
    name, needed, tmp_path
):
    pytest.importorskip(needed)
    on_two_ranks(tmp_path, "tests/examples/wrapped_layer_adam.py", name)
