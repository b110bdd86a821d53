"""What the report says of the forecast: how well it predicts, and what it predicts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlab.core.document import Document
from shardlab.forecast.extrapolation import Point
from shardlab.forecast.results import ForecastDocument
from shardlab.report.cells import RUN, Column
from shardlab.report.forecast_columns import BREAK_EVEN, CHECKS
from shardlab.report.numbers import percent
from shardlab.report.tables import Table

_MEDIAN_GOAL, _WORST_GOAL = 0.05, 0.15


@dataclass(frozen=True)
class ForecastRoom:
    """Sentences and tables in the order in which they are shown."""

    verdict: str
    left_out: list[str]
    checks: Table
    break_even: Table
    scaling: Table
    assumptions: list[str]
    points: list[Point]

    @property
    def tables(self) -> list[Table]:
        """All of them."""
        return [self.checks, self.break_even, self.scaling]


def forecast_room(predicted: ForecastDocument) -> ForecastRoom:
    """From all that a forecast says; the checks with the largest errors come first."""
    held_out = [each for each in predicted.checks if each.held_out]
    links = [f"{name}: {source}." for name, source in predicted.links.items()]
    return ForecastRoom(
        verdict=_verdict(predicted),
        left_out=[f"{run}: {why}." for run, why in predicted.left_out.items()],
        checks=_table(
            "Forecast against timings that it has not seen",
            CHECKS,
            sorted(held_out, key=lambda each: -abs(each.error)),
        ),
        break_even=_table(
            "Up to which rate a codec pays, with two ranks that have cores of their own",
            BREAK_EVEN,
            predicted.break_even,
        ),
        scaling=_scaling(predicted.points),
        assumptions=[*predicted.assumptions, *links],
        points=predicted.points,
    )


def _verdict(predicted: ForecastDocument) -> str:
    """The errors on what the model has not seen, against the goals."""
    learnt = f"The model has learnt from {len(predicted.fitted_on)} timed runs"
    found = predicted.summary
    if found is None:
        return f"{learnt}; no other was timed, so nothing says how well it predicts."
    met = found.median <= _MEDIAN_GOAL and found.worst <= _WORST_GOAL
    goal = f"{percent(_MEDIAN_GOAL, 0)} and {percent(_WORST_GOAL, 0)}"
    return (
        f"{learnt} and predicts the step time of {found.runs} others with an error of "
        f"{percent(found.median)} (median) and {percent(found.worst)} (worst); the goals of {goal} "
        f"are {'met' if met else 'missed'}. The 95 % intervals hold {percent(found.within, 0)} of "
        "the measurements. With the speed of computation of the very timing, "
        "which drifts where others use the machine too, the errors are "
        f"{percent(found.median_of_communication)} and {percent(found.worst_of_communication)}."
    )


def _table(title: str, columns: list[Column], rows: Iterable[Document]) -> Table:
    cells = [[column.cell(row.model_dump()) for column in columns] for row in rows]
    return Table(title, columns, cells)


def _scaling(points: Sequence[Point]) -> Table:
    """Efficiency by run and link, a column for every number of ranks."""
    sizes = sorted({point.ranks for point in points})
    found = {(p.run, p.link, p.ranks): percent(p.efficiency) for p in points}
    meaning = "throughput of a rank against one that does not communicate, by the model"
    columns = [
        RUN,
        Column("preset", "", lambda row: str(row["link"]), "cluster that is assumed", False),
        *(
            Column(f"{n:,} ranks", "", lambda row, n=n: str(row[n]), meaning)  # type: ignore[misc]
            for n in sizes
        ),
    ]
    rows = [
        {"run": run, "link": link, **{size: found[run, link, size] for size in sizes}}
        for run, link in dict.fromkeys((p.run, p.link) for p in points)
    ]
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table("Forecast: throughput of a rank against one without communication", columns, cells)
