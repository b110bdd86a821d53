"""The callback of Hugging Face's Trainer."""

from types import SimpleNamespace

import pytest

from shardlab.core.errors import UserError
from shardlab.hf import CompressionCallback
from tests.examples.scripts import on_two_ranks


@pytest.mark.long
def test_a_trainer_compresses_logs_and_averages_its_replicas(tmp_path):
    pytest.importorskip("accelerate")
    on_two_ranks(tmp_path, "tests/trained_by_callback.py", str(tmp_path))


def test_one_process_is_refused_with_the_command():
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))
    callback = CompressionCallback(trainer, "int8")
    with pytest.raises(UserError, match="in one process: start the script by torchrun"):
        callback.on_train_begin()
