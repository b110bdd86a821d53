"""Measure the costs of single operations on this machine, for the forecast."""

from shardlab.core.errors import UserError
from shardlab.core.launch_environment import node_count
from shardlab.core.progress import say
from shardlab.predict.calibrate import calibrate, detect
from shardlab.predict.codec_costs import codecs_of
from shardlab.predict.settings import Forecast
from shardlab.results.calibration_record import memory_operations
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import each_timing
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.settings import Train
from stages.sections import Sections

_OUTPUT = "results/calibration.json"


def main(params: Sections) -> None:
    """Write results/calibration.json for the ranks that the forecast is fitted on, and
    results/hardware.json."""
    forecast = params("forecast", Forecast, "space", "timings")
    train = params("train", Train, "world_size", "threads", "placement", "timeout_s")
    timings = each_timing(params("timings", dict[str, Timing]))
    strategies = params.plain("strategies") | params.plain("timed_strategies")
    runs = {run for timing in timings.values() for run in timing.runs}
    timed = sorted({parse_strategy(strategies[run]).canonical() for run in runs}, key=Strategy.hash)
    nodes = node_count(train.world_size)
    sizes = dict.fromkeys(timings[name].world_size for name in forecast.timings)
    # a step of srun has these ranks alone
    several = [ranks for ranks in ([train.world_size] if nodes > 1 else sizes) if ranks > 1]
    # the search may propose to slide where no timing does
    sliding = parse_strategy({"engine": "slide"}).canonical()
    memory = dict.fromkeys(each for some in (sliding, *timed) for each in memory_operations(some))
    if not several:
        raise UserError("forecast.timings: none of them has several ranks: add one that has")
    found = calibrate(
        several,
        codecs_of(timed, forecast.space),
        train.threads,
        train.timeout_s,
        placement=train.placement,
        memory=[*memory],
        nodes=nodes,
    )
    if found is None:
        return
    detect(found).to_file("results/hardware.json")
    found.to_file(_OUTPUT)
    say(f"calibrate: {_OUTPUT}")
