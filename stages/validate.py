"""Measure perplexity and bits per byte of the models of a run on the validation split."""

from pathlib import Path

from shardlab.core.progress import say
from shardlab.models.settings import Model
from shardlab.results.files import read_failure
from shardlab.results.train_result import Validation
from shardlab.train.evaluation import validate_run
from shardlab.train.settings import Train
from stages.common import refuse_other_tokens, require
from stages.sections import Sections


def main(params: Sections, run: str) -> None:
    """Write results/validate/RUN/seedS.json for every seed."""
    refuse_other_tokens(params)
    train = params("train", Train, "threads", "placement", "sequence_length", "timeout_s")
    model = params("model", Model)
    for seed in params("seeds", list[int]):
        validate_seed(Path("results"), run, seed, train, model)


def validate_seed(results: Path, run: str, seed: int, train: Train, model: Model) -> None:
    """Write what the stage writes of one seed.

    Args:
        results: folder with train/, for validate/.
    """
    folder = results / "train" / run / f"seed{seed}"
    require(folder / "metrics.json", f"train --run {run} --seed {seed}")
    crash = read_failure(folder / "metrics.json", f"run shardlab train --run {run}")
    output = results / "validate" / run / f"seed{seed}.json"
    if crash is not None:
        crash.to_file(output)
        return
    validate_run(folder / "final_model", output, train, model, seed, Path("data"))
    measured = Validation.from_file(output, "validate again")
    say(f"validate {run} seed {seed}: {_change(measured, model)}")


def _change(found: Validation, model: Model) -> str:
    """Return the perplexity before and after training in words."""
    start = "start" if model.pretrained else "untrained"
    figures = found.untrained_ppl, found.val_ppl
    before, after = ("not finite" if ppl is None else f"{ppl:.1f}" for ppl in figures)
    return f"perplexity {before} ({start}) \N{RIGHTWARDS ARROW} {after}"
