"""Predict every strategy, shorten the list, and choose what a round of the search races."""

from pathlib import Path

from shardlab.config.calibration_record import Calibration
from shardlab.config.machine import Hardware
from shardlab.config.parameters import Parameters
from shardlab.config.run_record import read_records
from shardlab.config.timing_record import read_all
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.forecast.results import fitted_runs
from shardlab.models.sizes import ModelShapes
from shardlab.search.evidence import data_facts, machine_facts
from shardlab.search.history import hold_fastest, initial_history, load_history
from shardlab.search.judge import judge_of
from shardlab.search.prediction import Predictor, fit, workload_of
from shardlab.search.proposal import Proposer
from shardlab.search.space import predicted_peaks
from stages.common import SAMPLES, integer, run

RESULTS = "results/results.jsonl"
ANSWERS = Path("results/answers")
"""of a language model that judges: kept when the round is repeated, so that it needs no server"""


def main(params: Parameters, number: str) -> None:
    """Write proposal.json of the round."""
    agent, here = params.agent_of(number), params(f"rounds.{number}")
    train, forecast, timings, model = params("train", "forecast", "timings", "model")
    train = train.only(*SAMPLES, "threads", "clip", "link")
    timed = read_all(Path("results/timings"), timings)
    first = initial_history(read_records(RESULTS), timed, agent, train, here.search)
    history = load_history(here.after, RESULTS, first)
    detected = Hardware.from_file("results/hardware.json", "run python -m stages.calibrate")
    hardware = detected.changed_by(agent.hardware)
    agent = agent.on(hardware, history.workload.world_size)
    shapes = ModelShapes.of(model, train, Path("data/tokens"), bool(hardware.gpus))
    # first the limit has to be known: of the hardware, and of the formula where nothing was trained
    history = hold_fastest(history, agent, predicted_peaks(history, shapes))
    calibration = Calibration.from_file(
        "results/calibration.json", "run python -m stages.calibrate"
    )
    raced = [run for race in history.races for run in race.runs]
    fitted = fit(calibration, fitted_runs(timed, forecast), raced)
    workload = workload_of(history, agent, train, timed)
    predictor = Predictor(fitted, workload, shapes, history)
    statistics = read_json("data/statistics.json", "run python -m stages.tokenize")
    facts = machine_facts(hardware), data_facts(statistics)
    proposer = Proposer(history, agent, forecast.space, shapes, predictor, facts)
    proposal = proposer.propose(integer("round", number), judge_of(agent, ANSWERS))
    proposal.to_file(Path("results/rounds", number, "proposal.json"))
    if proposal.space is not None:
        say(f"round {number}: {proposal.space.predicted} strategies predicted")
    say(f"round {number}: {proposal.verdict.judge}: {proposal.verdict.reason}")


if __name__ == "__main__":
    run(main)
