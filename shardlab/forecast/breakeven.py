"""Break-even link rates: the rate up to which a codec shortens the step."""

from collections.abc import Callable, Iterable

from shardlab.core.document import Document
from shardlab.forecast.costs import Measured
from shardlab.forecast.extrapolation import by_itself
from shardlab.forecast.machine import CodecLines
from shardlab.forecast.model import Model, strategy_of
from shardlab.forecast.step import step_seconds
from shardlab.records.timing import TimedRun
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.strategy import CanonicalStrategy, parse_strategy

SLOWEST, FASTEST = 1e6, 1e12
"""bounds of the searched link rates, bits per second"""
_MESSAGE = 1 << 18
"""elements of a rank's part of the message for which codecs are compared"""
_HALVINGS = 40


class BreakEven(Document):
    """Break-even rates of one run with a codec, in bits per second."""

    run: str
    codec: str
    """codecs of gradients and of weights"""
    ratio: float
    """payload bytes over raw bytes of gradients"""
    exposed: float
    """for a fully exposed reduction of gradients, by `exposed_rate`"""
    step: float | None
    """for the whole step, by simulation, against the same strategy without codecs; None: the codec
    pays at every rate or at none"""
    always: bool
    """whether the codec pays at every rate, where `step` is None"""


def exposed_rate(codec: CodecLines, elements: float, ranks: int) -> float:
    """Return the bits per second at which a reduce-scatter of n elements takes equally long with
    and without the codec.

    (1 - r) (W - 1)/W 4 n / rate = encoding n + decoding n, with r payload bytes per raw byte: what
    fewer bytes save is what the codec costs.
    """
    each = elements / ranks
    saved = (4 * each - codec.payload.at(each)) * (ranks - 1)
    cost = ranks * (codec.encode.at(each) + codec.decode.at(each))
    return max(8 * saved / cost, 0.0)


def break_even(runs: Iterable[TimedRun], model: Model, ranks: int = 2) -> list[BreakEven]:
    """Return the break-even rates of every compressing run, for ranks with cores of their own."""
    found = (_break_even(run, model, ranks) for run in runs)
    return [each for each in found if each is not None]


def _break_even(run: TimedRun, model: Model, ranks: int) -> BreakEven | None:
    strategy, work = strategy_of(run), by_itself(run, model)
    lines = work.gradients.codec or work.weights.codec
    if lines is None:
        return None
    names = [codec_text(strategy.gradients.codec)]
    names += [f"weights {codec_text(strategy.weights.codec)}"] if strategy.weights else []
    bare = _without_codecs(run, strategy)
    step, always = _crossing(lambda rate: _gain(run, bare, model, ranks, rate))
    return BreakEven(
        run=run.run,
        codec=", ".join(names),
        ratio=lines.payload.at(_MESSAGE) / (4 * _MESSAGE),
        exposed=exposed_rate(lines, ranks * _MESSAGE, ranks),
        step=step,
        always=always,
    )


def _without_codecs(run: TimedRun, strategy: CanonicalStrategy) -> TimedRun:
    """Return the same all-to-all route without a codec."""
    plain = {"gradients": {"codec": "none", "route": "exchange"}, "weights": None}
    given = strategy.model_dump(mode="json") | plain
    normal = parse_strategy(given, run.run).canonical()
    return run.model_copy(update={"strategy": normal.model_dump(mode="json")})


def _gain(run: TimedRun, bare: TimedRun, model: Model, ranks: int, rate: float) -> float:
    """Return the seconds per step that the codecs save on a link of a given rate."""
    costs = Measured(model.machine, ranks, cores=ranks, bits_per_second=round(rate))
    with_codecs, without = (step_seconds(by_itself(each, model), costs) for each in (run, bare))
    return without - with_codecs


def _crossing(gain: Callable[[float], float]) -> tuple[float | None, bool]:
    """Return the rate at which the gain changes sign, or whether it is positive everywhere."""
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0 or gain(high) >= 0:
        return None, gain(high) >= 0
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low, False
