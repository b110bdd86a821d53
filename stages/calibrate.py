"""Measure the costs of single operations on this machine, for the forecast."""

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.core.launch_environment import node_count
from shardlab.core.progress import say
from shardlab.predict.calibrate import calibrate, detect
from shardlab.predict.codec_costs import codecs_of
from shardlab.results.calibration_record import memory_operations
from shardlab.results.settings import each_timing
from shardlab.strategy.document import Strategy, parse_strategy
from stages.common import run

_OUTPUT = "results/calibration.json"


def main(params: Parameters) -> None:
    """Write results/calibration.json for the ranks that the forecast is fitted on, and
    results/hardware.json."""
    forecast, train = params("forecast", "train")
    train = train.only("world_size", "threads", "placement")
    timings, strategies = each_timing(params("timings")), params.all_strategies()
    runs = {run for timing in timings.values() for run in timing.runs}
    timed = sorted({strategies[run].canonical() for run in runs}, key=Strategy.hash)
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


if __name__ == "__main__":
    run("calibrate", main)
