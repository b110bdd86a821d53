"""Two ways to sum 8-bit integers: with shared scales by the backend, or as payloads all-to-all."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from shardlab.core.document import Document
from shardlab.forecast.coding import Coding
from shardlab.forecast.costs import OnCluster
from shardlab.forecast.machine import Machine
from shardlab.forecast.presets import preset
from shardlab.forecast.schedule import Phase, Task, duration, simulate
from shardlab.strategy.codec_options import SharedInt8Spec

ELEMENTS = 1 << 22
"""of the reduced vector"""
_SHARED, _EXCHANGED = "int8-shared", "int8"
_Lines = TypeVar("_Lines")


class IntegerSum(Document):
    """Reduce-scatter of one large vector in both ways; milliseconds."""

    link: str
    ranks: int
    shared_ms: float
    """`int8-shared`: maxima, then integers by the backend's reduce-scatter"""
    exchanged_ms: float
    """`int8`: payloads all-to-all"""
    shared_messages_ms: float
    """of `shared_ms`, the messages alone: codecs run as fast as on the measured machine"""
    exchanged_messages_ms: float


def integer_sums(machine: Machine, links: Sequence[str], ranks: Iterable[int]) -> list[IntegerSum]:
    """Compare both ways on cluster presets, for the numbers of ranks that `int8-shared` allows.

    Returns:
        nothing where one of the codecs was not calibrated.
    """
    shared = _first(machine.phased, _SHARED)
    payload = _first(machine.codecs, _EXCHANGED)
    if shared is None or payload is None:
        return []
    codings = Coding(None, False, 0, 4, phased=shared), Coding(payload, False, 0, 4)
    most = SharedInt8Spec.most_ranks or 0
    counts = [count for count in ranks if count <= most]
    return [_compare(codings, link, count) for link in links for count in counts]


def _compare(codings: Sequence[Coding], link: str, ranks: int) -> IntegerSum:
    costs = OnCluster(preset(link), ranks)
    shared, exchanged = (costs.reduce_scatter(ELEMENTS, each) for each in codings)
    return IntegerSum(
        link=link,
        ranks=ranks,
        shared_ms=_ms(shared, costs),
        exchanged_ms=_ms(exchanged, costs),
        shared_messages_ms=_ms([each for each in shared if each.operation], costs),
        exchanged_messages_ms=_ms([each for each in exchanged if each.operation], costs),
    )


def _first(known: Mapping[tuple[str, bool], _Lines], name: str) -> _Lines | None:
    """Return the costs of a codec of this name, of the first in alphabetical order."""
    kinds = sorted(kind for kind in known if kind[0].partition(":")[0] == name)
    return known[kinds[0]] if kinds else None


def _ms(phases: Sequence[Phase], costs: OnCluster) -> float:
    return 1e3 * duration(simulate([Task("sum", "lane", tuple(phases))], costs.rank))
