"""Predict every strategy, shorten the list, and choose what a round of the search races."""

from pathlib import Path

from shardlab.choose.evidence import describe_data, describe_machine
from shardlab.choose.history import initial_history, load_history
from shardlab.choose.incumbent import with_best_incumbent
from shardlab.choose.judge import make_judge
from shardlab.choose.limits import with_limits
from shardlab.choose.proposal import predictor, propose
from shardlab.choose.records import TrialSettings
from shardlab.choose.settings import Agent
from shardlab.choose.space import peaks_by_hash
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.models.settings import Model
from shardlab.models.sizes import ModelShapes
from shardlab.predict.results import fitted_runs
from shardlab.predict.settings import Forecast
from shardlab.results.calibration_record import Calibration
from shardlab.results.files import read_results, read_timings
from shardlab.results.hardware import Hardware
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_result import TimingResult
from shardlab.train.settings import Train
from stages.common import refuse_other_tokens
from stages.sections import Sections

RESULTS = "results/results.jsonl"
ANSWERS = Path("results/answers")
"""of a language model that judges: kept when the round is repeated, so that it needs no server"""
_CALIBRATE = "run shardlab calibrate"


def main(params: Sections, number: str) -> None:
    """Write proposal.json of the round."""
    refuse_other_tokens(params)
    agent = params(f"rounds.{number}.agent", Agent)
    search = params(f"rounds.{number}.search", str | None)
    train, model = params("train", Train), params("model", Model)
    forecast, timings = params("forecast", Forecast), params("timings", dict[str, Timing])
    timed = only(read_timings(Path("results/timings"), timings), TimingResult)
    records = read_results(RESULTS, "run shardlab collect")
    first = initial_history(records, timed, agent, train, search)
    history = load_history(params(f"rounds.{number}.after", str), RESULTS, first)
    detected = Hardware.from_file("results/hardware.json", _CALIBRATE)
    hardware = detected.changed_by(agent.hardware)
    limit_gb = agent.memory_limit_gb or hardware.memory_of_rank_gb(history.workload.world_size)
    assert limit_gb is not None, "calibrate detects the memory"
    limit = int(1e9 * limit_gb)
    step = train.step_size(history.workload.world_size)
    shapes = ModelShapes.of(model, step, Path("data/tokens"), bool(hardware.gpus))
    peaks = peaks_by_hash(history, shapes)
    history = with_best_incumbent(history, agent.quality_tolerance, limit, peaks)
    calibration = Calibration.from_file("results/calibration.json", _CALIBRATE)
    fitted = fitted_runs(timed, forecast)
    link = agent.link or train.link
    predict = predictor(calibration, timed, fitted, history, link, train.threads, shapes)
    statistics = read_json("data/statistics.json", "run shardlab tokenize")
    context = describe_machine(hardware), describe_data(statistics)
    proposal = propose(
        int(number),
        history,
        agent,
        limit,
        forecast.space,
        shapes,
        predict,
        make_judge(agent, ANSWERS),
        timed,
        TrialSettings.of(train, model, params("seeds", list[int])),
        context,
    )
    proposal = with_limits(proposal, agent, history, timed)
    proposal.to_file(Path("results/rounds", number, "proposal.json"))
    predicted = "" if proposal.space is None else f"{proposal.space.predicted} predicted; "
    if proposal.space is not None and proposal.space.too_short:
        say(f"propose {number}: not proposed: {proposal.space.too_short}")
    say(f"propose {number}: {predicted}{proposal.verdict.judge}: {proposal.verdict.reason}")
