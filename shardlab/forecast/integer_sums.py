"""Two ways to sum 8-bit integers: with shared scales by the backend, or as payloads all-to-all."""

from collections.abc import Iterable, Sequence

from shardlab.config.codec_options import SharedInt8Spec
from shardlab.core.document import Document
from shardlab.forecast.coding import Coding, calibrated
from shardlab.forecast.costs import OnCluster
from shardlab.forecast.machine import Machine
from shardlab.forecast.presets import preset

_ELEMENTS = 1 << 22
"""of the reduced vector"""


class IntegerSum(Document):
    """Milliseconds of a reduce-scatter of one large vector, by `int8-shared` and by `int8`."""

    link: str
    ranks: int
    shared_ms: float
    exchanged_ms: float
    shared_messages_ms: float
    """of `shared_ms`, the messages alone: codecs run as fast as on the measured machine"""
    exchanged_messages_ms: float


def integer_sums(machine: Machine, links: Sequence[str], ranks: Iterable[int]) -> list[IntegerSum]:
    """Compare both ways on cluster presets, for the numbers of ranks that `int8-shared` allows;
    return nothing where one of the codecs was not calibrated."""
    shared, exchanged = calibrated(machine, "int8-shared"), calibrated(machine, "int8")
    if shared is None or exchanged is None:
        return []
    counts = [count for count in ranks if count <= (SharedInt8Spec.most_ranks or count)]
    return [_compare(shared, exchanged, link, count) for link in links for count in counts]


def _compare(shared: Coding, exchanged: Coding, link: str, ranks: int) -> IntegerSum:
    costs = OnCluster(preset(link), ranks)
    times = {}
    for name, coding in {"shared": shared, "exchanged": exchanged}.items():
        phases = costs.reduce_scatter(_ELEMENTS, coding)
        messages = [each for each in phases if each.operation]
        times[f"{name}_ms"] = 1e3 * costs.alone(phases)
        times[f"{name}_messages_ms"] = 1e3 * costs.alone(messages)
    return IntegerSum(link=link, ranks=ranks, **times)
