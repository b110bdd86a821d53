"""Announcement of an experiment before it runs: parameters of the model, jobs, time and disk."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardlab.core.numbers import number, plural
from shardlab.models.shapes import decoder_of, gpt2_config, read_decoder

if TYPE_CHECKING:
    from shardlab.config.experiment import Params

_NAMES = {"train": "training run", "tune": "tuned method", "timing": "timing", "trial": "race"}


def announcement(
    params: "Params", jobs: Mapping[str, int], seconds: Sequence[float | None]
) -> list[str]:
    """Return lines on the jobs that are about to run.

    Args:
        params: with all sections.
        jobs: their number, by rule.
        seconds: what each took before, or others of its stage did; None: no such job ran yet.
    """
    counts = [plural(jobs[rule], name) for rule, name in _NAMES.items() if rule in jobs]
    lines = [", ".join([plural(sum(jobs.values()), "job"), *counts]), _time(seconds)]
    runs, size = jobs.get("train", 0), _parameters(params)
    if not runs or size is None:
        return lines
    tokens = params.tokenize.for_model(params.model).tokens if params.model.shape else None
    words = f" with {tokens:,} tokens" if tokens else ""
    model = f"model {params.model.name}: {number(size)} parameters{words}"
    return [
        model,
        *lines,
        f"{plural(runs, 'trained model')}: {number(4 * size * runs, 'B')} on disk",
    ]


def _time(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    if not known:
        return "time unknown before a first run"
    total = sum(known)
    text = f"{total:.2g} s" if total < 99 else f"{total / 60:,.0f} minutes"
    text += ", as such jobs took with the parameters of then"
    new = len(seconds) - len(known)
    return f"more than {text}; new: {plural(new, 'job')}" if new else f"about {text}"


def _parameters(params: "Params") -> int | None:
    """Return the number of parameters; None where it takes transformers or a tokenizer's file."""
    model, vocabulary = params.model, params.tokenize.for_model(params.model).tokens
    if model.shape is None:
        decoder = read_decoder(model.pretrained or model.config or "")
    elif vocabulary is None:
        return None
    else:
        sizes = {"vocab_size": vocabulary, "n_positions": params.train.sequence_length}
        decoder = decoder_of(gpt2_config(*model.shape, **sizes), "model")
    return decoder.parameters if decoder else None
