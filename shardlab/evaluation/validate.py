"""Quality of a saved model beside that of the same model before its first step."""

from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardlab.core.files import write_json
from shardlab.data.tokens.tokens import open_split
from shardlab.evaluation.evaluate import evaluate
from shardlab.evaluation.saved_model import load_model
from shardlab.evaluation.untrained import build_for
from shardlab.experiment.schema import Model, Train
from shardlab.launch import launch
from shardlab.records.run import Validation

_BATCH = 32
"""sequences per forward pass; it changes no result"""


def validate_run(
    final_model: Path, output: Path, train: Train, model: Model, seed: int, data: Path
) -> None:
    """Writes the `Validation` of a saved model to `output`.

    The work is done in a child process: this one stays free of threads, so that it can fork ranks.

    Args:
        model, seed: of the untrained model that it is compared with.
        data: folder that holds tokens/.

    Raises:
        RunFailed: the child process failed.
        UserError: the saved model or the tokens cannot be used.
    """
    worker = partial(_work, final_model, output, train, model, seed, data)
    launch(worker, 1, train.threads, train.timeout_s, placement=train.placement)


def _work(
    final_model: Path,
    output: Path,
    train: Train,
    model: Model,
    seed: int,
    data: Path,
    group: dist.ProcessGroup,
) -> None:
    split = open_split(data / "tokens", "validation")
    length = train.sequence_length
    trained = evaluate(load_model(final_model), split, length, _BATCH)
    first = build_for(model, train, seed, split).whole()
    untrained = evaluate(first, split, length, _BATCH)
    validation = Validation(
        val_loss=trained.loss,
        val_ppl=trained.perplexity,
        val_bits_per_byte=trained.bits_per_byte,
        val_tokens=trained.tokens,
        untrained_ppl=untrained.perplexity,
    )
    write_json(output, validation.model_dump(mode="json"))
