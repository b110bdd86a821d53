"""The record of a run, measured as a trial measures it."""

from pathlib import Path

from shardlab.config.run_record import Record
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from stages.trial import evaluated


def measure(plan: RunPlan, folder: Path) -> Record:
    """Run `plan` in child processes and return its record; files are left in `folder`."""
    train_run(plan, folder)
    return evaluated(plan, folder)
