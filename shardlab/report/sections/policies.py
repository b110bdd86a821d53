"""Section on policies: how near the best strategy each way to search comes, by measurements."""

from shardlab.report.evidence import Evidence
from shardlab.report.numbers import Row, fixed, percent, plural, share, within, words
from shardlab.report.tables import Column, Section, Table, make_table
from shardlab.search.policies.documents import NEAR, Interval, PolicyComparison, Summary

_SHOWN = (0, 1, 2, 4, 8, 16)
"""numbers of measurements that have a column"""
_NEAR = percent(NEAR, 0)

POLICY = Column(
    "policy",
    "",
    words("run"),
    "rules: the search with its default judge; forecast: the order of the first predictions; "
    "greedy: as few changes as possible of the best so far; tpe, gp: samplers of Optuna; matrix: "
    "the runs of the comparison, the fastest first; constant: the order of params.yaml; first "
    "listed: the search, the first candidate of each shortlist; model: the search with a language "
    "model as judge; shuffled: told predictions and measurements of the wrong strategies",
    False,
)
SHARES = [
    Column(
        "close", "%", share("near", 0), f"share of replays within {_NEAR} of the best, at the end"
    ),
    Column("first pick the best", "%", share("first", 0), ""),
    Column(f"first pick within {_NEAR}", "%", share("first_near", 0), ""),
    Column("measured", "", lambda row: fixed(row["measured"], 1), "strategies besides the start"),
    Column(
        "abstained", "%", share("abstained", 0), "share of replays that ended before the budget"
    ),
    Column(
        "infeasible",
        "per replay",
        lambda row: fixed(row["infeasible"], 1),
        "proposals that were none of the strategies to choose from",
    ),
    Column(
        "order flips",
        "per replay",
        lambda row: fixed(row["flips"], 1),
        "answers that depended on the order of the candidates",
    ),
]


def policies(evidence: Evidence) -> Section | None:
    """Show regret by number of measurements, and what else the replays say."""
    found = evidence.policies
    if not found.tables:
        return None
    budgets = range(len(found.summaries[0].regret))
    strategies = " and ".join(map(str, sorted({*found.tables.values()})))
    return Section(
        "Policies of the search",
        sentences=[
            f"Every policy is replayed {plural(found.seeds, 'time')} on each of "
            f"{plural(len(found.tables), 'timing')} with {strategies} strategies. It measures the "
            f"start, then up to {budgets[-1]} others. Regret is how much longer than the best "
            "one's the step of the fastest so far is; half of the repetitions are what a policy "
            "measures, the other half says what its choice is worth. So noise can make it "
            "negative. Intervals: paired bootstrap over timings and replays, 95 %.",
            verdict(found),
        ],
        tables=[
            _by_budget("Mean regret by number of measurements", found, "regret"),
            _by_budget(f"Mean regret beyond that of {found.reference}", found, "ahead"),
            _by_timing(found),
            _table("Replays", SHARES, found),
        ],
    )


def verdict(found: PolicyComparison) -> str:
    """Return a sentence on the reference: how near it comes, and which policies it is ahead of."""
    known = {each.policy: each for each in found.summaries}
    own = known.pop(found.reference)
    worst = max(own.by_workload, key=own.by_workload.__getitem__)
    ahead = [name for name, each in known.items() if all(a.low > 0 for a in each.ahead[1:])]
    return (
        f"At the end {found.reference} are within {_NEAR} of the best in {percent(own.near, 0)} of "
        f"the replays; their mean regret is {percent(own.regret[-1].mean)}, at most "
        f"{percent(own.by_workload[worst])} on a timing ({worst}). At every number of measurements "
        f"they are ahead, by an interval above 0, of {', '.join(ahead) or 'no other policy'}."
    )


def _by_budget(title: str, found: PolicyComparison, field: str) -> Table:
    def column(budget: int) -> Column:
        return Column(str(budget), "%", lambda row: _interval(row[field][budget]), "")

    last = len(found.summaries[0].regret) - 1
    return _table(title, [column(n) for n in sorted({*_SHOWN, last}) if n <= last], found)


def _by_timing(found: PolicyComparison) -> Table:
    def column(name: str) -> Column:
        return Column(name, "%", lambda row: fixed(100 * row["by_workload"][name], 1), "")

    return _table("Mean regret at the end by timing", [*map(column, found.tables)], found)


def _table(title: str, columns: list[Column], found: PolicyComparison) -> Table:
    return make_table(title, [POLICY, *columns], map(_row, found.summaries), found.reference)


def _row(each: Summary) -> Row:
    return {name: getattr(each, name) for name in Summary.model_fields} | {"run": each.policy}


def _interval(each: Interval) -> str:
    return within(100 * each.mean, 100 * each.low, 100 * each.high, 1)
