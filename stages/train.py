"""Train one run of the matrix with one seed, on local ranks or as one rank of torchrun or srun."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from shardlab.core.document import validate
from shardlab.core.errors import RunFailed, UserError
from shardlab.core.launch_environment import rank_environment
from shardlab.core.lock import is_job
from shardlab.core.progress import say
from shardlab.core.types import Seed
from shardlab.models.settings import Model
from shardlab.strategy.document import Strategy
from shardlab.train.crash import write_crash
from shardlab.train.plans import RunPlan
from shardlab.train.run import build_missing_tokens, train_run
from shardlab.train.settings import Train
from shardlab.train.utilization import show_placements
from stages.common import refuse_other_source, refuse_other_tokens
from stages.sections import Sections


def main(
    params: Sections,
    run: str,
    seed: int = 0,
    max_restarts: int = 0,
    show_placement: bool = False,
    resume: str | None = None,
) -> None:
    """Write metrics.json, events.jsonl, trace.json.gz and final_model/ of the run.

    As a job of Snakemake or DVC, a run whose ranks fail writes them too: metrics.json says why.
    """
    strategy, train = params(f"strategies.{run}", Strategy), params("train", Train)
    if show_placement:
        show_placements(train)
        return
    if resume is not None and train.checkpoint is None:
        raise UserError(f"--resume {resume}: give --set train.checkpoint.every=N as well")
    data = Path("data")
    refuse_other_source(params)
    plan = RunPlan(
        run, validate(Seed, seed, "--seed"), strategy, train, params("model", Model), data
    )
    if not is_job() and (data / "corpus.json").is_file():
        environment = rank_environment(train.world_size)
        rank = 0 if environment is None else environment.rank
        build_missing_tokens(data / "tokens", rank, partial(_tokenize, params))
    refuse_other_tokens(params)
    subfolder = Path(run, f"seed{seed}")
    folder, checkpoints, kept = "results/train" / subfolder, ".work/checkpoints" / subfolder, None
    if train.checkpoint is not None and train.checkpoint.folder is not None:
        kept = train.checkpoint.folder / subfolder
        checkpoints = kept / "running"
    try:
        train_run(
            plan,
            folder,
            telemetry="logs/tensorboard" / subfolder,
            checkpoints=checkpoints,
            max_restarts=max_restarts,
            kept=kept,
            resume=None if resume is None else Path(resume),
        )
    except RunFailed as failure:
        if not is_job():
            raise
        crash = write_crash(plan, folder, failure, f"logs/train/{run}/{seed}.log")
        say(f"train: {failure}")
        say(
            f"crashed: {run} seed {seed}: {crash.detail}; the other runs go on. To train it "
            f"again: rm -r {folder}, or dvc repro --force --single-item train@{run}-{seed}"
        )


def _tokenize(params: Sections) -> None:
    """Run the stage in a process of its own: this one does not depend on its code.

    Both tools make the tokens before they train, and have their own record of them.
    """
    command = [sys.executable, "-m", "shardlab", "tokenize", *params.arguments]
    status = subprocess.run(command).returncode
    if status > 0:  # it has said why
        raise SystemExit(status)
    if status < 0:
        raise UserError(f"shardlab tokenize was killed by signal {-status}: run it again")
