"""Announcement of an experiment before it runs: parameters of the model, jobs, time and disk."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from shardlab.core.numbers import number, plural
from shardlab.models.shapes import decoder_of, gpt2_config, read_decoder, vocabulary_of

if TYPE_CHECKING:
    from shardlab.config.experiment import Params

_NAMES = {"train": "training run", "tune": "tuned method", "timing": "timing", "trial": "race"}
_SHORT_RACE_S = 120.0
"""that a race of any experiment may take"""


def race_budget_s(timeout_s: float | None, training_s: float) -> float:
    """Return the seconds that the repetitions of a race may take: half of what is set for a trial,
    or else as long as the start was trained, and at least two minutes.

    Args:
        timeout_s: `agent.trial_timeout_s`.
        training_s: of the start, with all seeds.
    """
    return max(_SHORT_RACE_S, training_s) if timeout_s is None else timeout_s / 2


def announcement(params: "Params", jobs: Sequence[tuple[str, float | None]]) -> list[str]:
    """Return lines on the jobs that are about to run.

    Args:
        params: with all sections.
        jobs: rule of each, and the seconds that it took before, or others of its stage did; None:
            no such job ran yet.
    """
    numbers = Counter(rule for rule, _ in jobs)
    numbers["trial"] = min(numbers["trial"], params.agent.budget)
    counts = [plural(numbers[rule], name) for rule, name in _NAMES.items() if numbers[rule]]
    lines = [", ".join([plural(len(jobs), "job"), *counts]), _time(params, jobs)]
    runs, size = numbers["train"], _parameters(params)
    if not runs or size is None:
        return lines
    tokens = _vocabulary(params) if params.model.shape else None
    words = f" with {tokens:,} tokens" if tokens else ""
    model = f"model {params.model.name}: {number(size)} parameters{words}"
    return [
        model,
        *lines,
        f"{plural(runs, 'trained model')}: {number(4 * size * runs, 'B')} on disk",
    ]


def _time(params: "Params", jobs: Sequence[tuple[str, float | None]]) -> str:
    took = [seconds for _, seconds in jobs if seconds is not None]
    new = Counter(rule for rule, seconds in jobs if seconds is None)
    races_new = min(new["trial"], params.agent.budget)
    trained = [seconds for rule, seconds in jobs if rule == "train" and seconds is not None]
    training_s = len(params.seeds) * fmean(trained) if trained else 0.0
    race_s = race_budget_s(params.agent.trial_timeout_s, training_s)
    races = f"up to {_duration(race_s)} for each race" if races_new else ""
    if not took:
        if races and params.agent.trial_timeout_s is None:
            races += ", or as long as the start trains with all seeds"
        return "; ".join(["time unknown before a first run", *([races] if races else [])])
    then = "as such jobs took with the parameters of then"
    if not new:
        return f"about {_duration(sum(took))}, {then}"
    total_s = sum(took) + races_new * race_s
    jobs_new = ", ".join([plural(new.total(), "job"), *([races] if races else [])])
    return f"more than {_duration(total_s)}, {then}; new: {jobs_new}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99 else f"{seconds / 60:,.0f} minutes"


def _vocabulary(params: "Params") -> int | None:
    return vocabulary_of(params.tokenize.for_model(params.model.pretrained))


def _parameters(params: "Params") -> int | None:
    """Return the number of parameters; None where it takes transformers or a tokenizer's file."""
    model, vocabulary = params.model, _vocabulary(params)
    if model.shape is None:
        decoder = read_decoder(model.pretrained or model.config or "")
    elif vocabulary is None:
        return None
    else:
        sizes = {"vocab_size": vocabulary, "n_positions": params.train.sequence_length}
        decoder = decoder_of(gpt2_config(*model.shape, **sizes), "model")
    return decoder.parameters if decoder else None
