"""Accept what was faster in a race and is as good, or roll back; add the round to the history."""

from pathlib import Path

from shardlab.choose.decision import conclude
from shardlab.choose.history import initial_history, load_history
from shardlab.choose.records import Proposal, Trial
from shardlab.choose.settings import Agent
from shardlab.core.progress import say
from shardlab.results.files import read_results, read_timings
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_result import TimingResult
from shardlab.train.settings import Train
from stages.sections import Sections

RESULTS = "results/results.jsonl"


def main(params: Sections, number: str) -> None:
    """Write history.json of the round: all that the next round needs."""
    agent = params(f"rounds.{number}.agent", Agent)
    search = params(f"rounds.{number}.search", str | None)
    timings, train = params("timings", dict[str, Timing]), params("train", Train, "link")
    timed = only(read_timings(Path("results/timings"), timings), TimingResult)
    records = read_results(RESULTS, "run shardlab collect")
    first = initial_history(records, timed, agent, train, search)
    before = load_history(params(f"rounds.{number}.after", str), RESULTS, first)
    folder, fix = f"results/rounds/{number}", "run shardlab {} " + number
    proposal = Proposal.from_file(f"{folder}/proposal.json", fix.format("propose"))
    trial = Trial.from_file(f"{folder}/trial.json", fix.format("trial"))
    history = conclude(before, proposal, trial, agent)
    history.to_file(f"{folder}/history.json")
    last = history.rounds[-1]
    for warning in last.warnings:
        say(f"decide {number}: warning: {warning}")
    say(f"decide {number}: {last.decision}: {last.reason}")
