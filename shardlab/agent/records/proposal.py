"""Document of a proposal: candidates of a round, verdict, and the strategy to try."""

from pathlib import Path

from shardlab.agent.records.rounds import Candidate, Refused, Verdict
from shardlab.core.document import Document, validate
from shardlab.core.files import read_json
from shardlab.strategy.strategy import Strategy


class Proposal(Document):
    """Candidates of one round and the choice among them."""

    round: int
    incumbent_hash: str
    evidence: str
    memory_limit_bytes: int
    candidates: list[Candidate]
    refused: list[Refused]
    verdict: Verdict
    chosen: Strategy | None
    chosen_hash: str | None


def read_proposal(path: str | Path) -> Proposal:
    """Read the proposal in a file.

    Raises:
        UserError: the file is not a proposal.
    """
    return validate(Proposal, read_json(path), str(path))
