"""Kinds of methods that are compared, and the best of each by the rule that chooses."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.islands.curves import Curve, LinkTimes, Row
from benchmarks.islands.methods import METHODS, STOCK, TARGET, strategies, sync_of
from shardlab.choose.rank import Option, rank, simplicity_of
from shardlab.predict.asked import changes_training
from shardlab.results.interval import Ratio

ONE_DEVICE = "one device"
FAMILIES = {
    ONE_DEVICE: tuple(name for name, method in METHODS.items() if method.world_size == 1),
    "stock torch": tuple(name for name in METHODS if name.startswith(TARGET) or name == "hsdp"),
    "compressed steps": tuple(
        name for name in METHODS if name.startswith(("ddp-", "manual-")) or name == "hsdp-int8"
    ),
    "parameter synchronisation": tuple(name for name in METHODS if sync_of(name) is not None),
}


def family_of(row: Row) -> str:
    """Return the kind of a method."""
    return next(family for family, names in FAMILIES.items() if row.name in names)


def rows_of(curves: Mapping[str, Curve]) -> list[Row]:
    """Return the methods that reach the loss; stock ones with each type of gradients of torch."""
    rows = []
    for name, curve in curves.items():
        steps = curve.steps_to(curves[TARGET])
        if steps:
            engines = STOCK if name.startswith(TARGET) else (None,)
            rows += [Row(name, engine, steps) for engine in engines]
    return rows


class Comparison:
    """The methods on a link, ranked by their time to the loss."""

    def __init__(self, rows: Sequence[Row], link: LinkTimes) -> None:
        by_title = {row.title: row for row in rows}

        def compare(one: Option, other: Option) -> Ratio:
            return link.gain(by_title[str(other.name)], by_title[str(one.name)])

        options = {row.title: _option(row, rows[0], link) for row in rows}
        alone = [options[row.title] for row in rows if family_of(row) == ONE_DEVICE]
        several = [option for option in options.values() if option not in alone]
        ranking = rank(several, alone, tolerance=0.0, compare=compare)
        self._order = [by_title[str(name)] for name in ranking.names]
        self._ranking, self._options, self._rows = ranking, options, rows

    def first(self, names: Iterable[str]) -> Row | None:
        """Return the method to use among some; None where none of them reaches the loss."""
        return next((row for row in self._order if row.name in {*names}), None)

    def same_as(self, row: Row) -> list[Row]:
        """Return the methods that are not told apart from one."""
        same = {option.name for option in self._ranking.same_as(self._options[row.title])}
        return [other for other in self._rows if other.title in same]


def _option(row: Row, reference: Row, link: LinkTimes) -> Option:
    """Return a method as an option: its time to the loss over that of a reference."""
    strategy = strategies()[METHODS[row.name].strategy].canonical()
    return Option(
        row.title,
        step=None,
        to_loss=link.gain(reference, row),
        devices=METHODS[row.name].world_size,
        lossless=not changes_training(strategy),
        simplicity=simplicity_of(strategy),
    )
