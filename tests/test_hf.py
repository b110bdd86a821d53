"""The callback of Hugging Face's Trainer."""

import pytest
import transformers  # noqa: F401 - imported once, before a command is forked

from tests.examples.scripts import on_two_ranks


@pytest.mark.long
def test_a_trainer_compresses_logs_and_averages_its_replicas(tmp_path):
    pytest.importorskip("accelerate")
    on_two_ranks(tmp_path, "tests/trained_by_callback.py", str(tmp_path))
