"""Measure the costs of single operations on this machine, for the forecast."""

from shardlab.calibration.costs import codecs_of
from shardlab.calibration.hardware import detect
from shardlab.calibration.measure import Network, calibrate
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from shardlab.measurements.calibration import memory_operations
from shardlab.strategy.strategy import parse_strategy
from stages.common import run

_OUTPUT = "results/calibration.json"


def main(params: Parameters) -> None:
    """Write results/calibration.json for the ranks and links that the forecast is fitted on, and
    results/hardware.json."""
    forecast, strategies, timings, train = params("forecast", "strategies", "timings", "train")
    known = [timings[name] for name in forecast.timings]
    networks = dict.fromkeys(Network(t.world_size, link) for t in known for link in (None, t.link))
    used = dict.fromkeys(name for timing in timings.values() for name in timing.runs)
    full = [strategies[name].canonical() for name in used]
    # the search may propose to slide where no timing does
    sliding = parse_strategy({"engine": "slide"}).canonical()
    memory = dict.fromkeys(each for some in (sliding, *full) for each in memory_operations(some))
    several = [network for network in networks if network.world_size > 1]
    if not several:
        raise UserError("forecast.timings: none of them has several ranks: add one that has")
    found = calibrate(
        several,
        codecs_of(full, forecast.space),
        train.threads,
        train.timeout_s,
        placement=train.placement,
        memory=[*memory],
    )
    detect(found).to_file("results/hardware.json")
    found.to_file(_OUTPUT)
    say(f"calibrate: {_OUTPUT}")


if __name__ == "__main__":
    run(main)
