"""Document of a trial."""

from pathlib import Path

from shardlab.agent.records.rounds import Outcome
from shardlab.core.document import Document, validate
from shardlab.core.files import read_json
from shardlab.records.run import Record
from shardlab.strategy.strategy import CanonicalStrategy


class Trial(Document):
    """Outcome of a trial."""

    outcome: Outcome
    detail: str = ""
    """text of the error, for a failed trial"""
    strategy: CanonicalStrategy | None = None
    hash: str | None = None
    key: str | None = None
    """key in the store"""
    limit_s: float | None = None
    records: list[Record] = []
    """one per seed; empty unless the outcome is ok"""


def no_trial(reason: str) -> Trial:
    """Return the trial of a round in which nothing was chosen."""
    return Trial(outcome="none", detail=reason)


def read_trial(path: str | Path) -> Trial:
    """Read the trial in a file.

    Raises:
        UserError: the file is not a trial.
    """
    return validate(Trial, read_json(path), str(path))
