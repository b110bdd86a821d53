"""Kinds of methods that are compared, and the fastest of each."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.islands.curves import Curve, LinkTimes, Row
from benchmarks.islands.methods import METHODS, STOCK, TARGET, sync_of

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


def fastest(rows: Sequence[Row], names: Iterable[str], link: LinkTimes) -> Row | None:
    """Return the method among some that reaches the loss first on a link."""
    return min((row for row in rows if row.name in names), key=link.seconds, default=None)
