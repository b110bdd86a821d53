"""The saved model of a run, its perplexity and bits per byte, and the perplexity at its start."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from shardlab.core.errors import UserError
from shardlab.core.files import atomic, read_json
from shardlab.core.progress import track
from shardlab.data.loader import blocks
from shardlab.data.tokenizer import CONFIG
from shardlab.data.tokens import Tokens, open_split
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.results.train_result import Validation
from shardlab.train.launch import launch
from shardlab.train.settings import Train

# a progress bar for one small file is noise
disable_progress_bar()


def save_model(
    model: PreTrainedModel, parameters: dict[str, Tensor], tokenizer: Path, folder: Path
) -> None:
    """Write a model and its tokenizer in the format of Hugging Face, atomically.

    Args:
        model: gives the architecture; its weights are not used.
        parameters: the whole model by name.
        tokenizer: the tokenizer.json that the model was trained with, tokenizer_config.json beside
            it.
    """
    config = tokenizer.with_name(CONFIG)
    names = read_json(config, "run shardlab tokenize")
    known = Tokenizer.from_file(str(tokenizer))
    for kind in ("bos", "pad"):
        if isinstance(token := names.get(f"{kind}_token"), dict):
            token = token["content"]
        number = known.token_to_id(token) if token else None
        # special tokens that no text brings have no row
        if number is not None and number < model.config.get_text_config().vocab_size:
            setattr(model.config.get_text_config(), f"{kind}_token_id", number)
            setattr(model.config, f"{kind}_token_id", number)
    with atomic(folder) as temporary:
        model.save_pretrained(temporary, state_dict=parameters)
        # transformers reads the same from config.json; the other files are the outputs of the DAG
        (temporary / "generation_config.json").unlink(missing_ok=True)
        for path in (tokenizer, config):
            shutil.copyfile(path, temporary / path.name)


def load_model(folder: Path) -> PreTrainedModel:
    """Load the saved model, on the CPU in float32.

    Raises:
        UserError: a file is absent or damaged.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"{folder}: not a model: {' '.join(str(error).split())[:150]}: train the run again"
        ) from None


BATCH = 32
"""sequences per forward pass; it changes no result"""


class Evaluation(NamedTuple):
    """Quality of a model's predictions of a text."""

    loss: float
    """nats per token, mean over all predicted tokens"""
    tokens: int
    bits_per_byte: float | None
    """all nats over the bytes of the text; comparable across tokenizers; None where the tokenizer
    lost some of the text, or nobody knows its bytes"""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that exceeds the largest float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.no_grad()
def evaluate(model: nn.Module, text: Tokens, sequence_length: int, batch: int) -> Evaluation:
    """Return the quality over every token of a text but its first.

    The context of a token is its own window of `sequence_length` tokens.

    Raises:
        UserError: the model sees the tokens that it predicts.
    """
    model.eval()
    nats, tokens = 0.0, 0
    device = getattr(model, "device", "cpu")
    windows = blocks(text, sequence_length, batch)
    for index, window in enumerate(track(windows, "validate", unit="batch")):
        window = window.to(device)
        logits = model(input_ids=window[:, :-1]).logits.float()
        if not index:
            _refuse_looking_ahead(model, window[:1, :-1])
        targets = window[:, 1:].flatten()
        nats += float(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        tokens += targets.numel()
    size = None if text.altered else text.text_bytes
    return Evaluation(nats / tokens, tokens, size and nats / (math.log(2) * size))


def _refuse_looking_ahead(model: nn.Module, tokens: Tensor) -> None:
    """Refuse a model whose earlier logits depend on the last token: its loss would mean nothing.

    Args:
        tokens: shape `[1, length]`.
    """
    different = tokens[tokens != tokens[0, -1]]
    if not different.numel():
        return
    other = tokens.clone()
    other[0, -1] = different[0]
    first, second = (model(input_ids=each).logits[:, :-1].float() for each in (tokens, other))
    # rounding differs where experts or kernels group tokens, by far less than logits among them
    if (first - second).abs().max() > 1e-3 * first.std():
        raise UserError(
            f"model: {type(model).__name__} sees the tokens that it predicts, so that its loss "
            "means nothing: take a causal model"
        )


def _why(evaluation: Evaluation, which: str = "") -> str | None:
    """Return why figures of a model are not finite; None if they are."""
    if not math.isfinite(evaluation.loss):
        return f"{which}validation loss is not finite"
    if not math.isfinite(evaluation.perplexity):
        return f"{which}perplexity is infinite: the exponential of {evaluation.loss:.4g} nats"
    return None


def validate_run(
    final_model: Path, output: Path, train: Train, model: Model, seed: int, data: Path
) -> None:
    """Write the `Validation` of a saved model to `output`.

    A child process does the work: this one stays free of threads, so that it can fork ranks.

    Args:
        model, seed: of the model at its start.
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
    trained = evaluate(load_model(final_model), split, length, BATCH)
    built = build_model(model, split.vocabulary, length, split.end_of_text, seed)
    start = evaluate(built.whole(), split, length, BATCH)
    which = "start: " if model.pretrained else "untrained "
    validation = Validation(
        val_loss=trained.loss,
        val_ppl=trained.perplexity,
        val_bits_per_byte=trained.bits_per_byte,
        val_tokens=trained.tokens,
        untrained_ppl=start.perplexity,
        not_finite=_why(trained) or _why(start, which),
    )
    validation.to_file(output)
