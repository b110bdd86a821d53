"""Records of replayed policies of a search."""

from shardlab.core.document import Document


class Replay(Document):
    """One policy on one table."""

    policy: str
    workload: str
    """name of the timing"""
    seed: int
    """of the halves and of the policy"""
    picks: list[str]
    """hashes, in the order in which they were measured; the start is not among them"""
    regret: list[float]
    """step of the best so far over the oracle's, less 1, both in the other half: after the start
    alone, then after each measurement of the budget. The oracle is the best of all by the half that
    policies measure"""
    first: bool
    """whether the first pick is the oracle"""
    abstained: bool
    """whether the policy stopped before the budget was spent"""
    infeasible: int
    flips: int


class Interval(Document):
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float


class Summary(Document):
    """Figures of one policy over all replays."""

    policy: str
    regret: list[Interval]
    """by budget; the first is that of the start"""
    ahead: list[Interval]
    """regret less that of the reference, by budget: positive where the reference is better"""
    by_workload: dict[str, float]
    """mean regret after the budget, by workload"""
    near: float
    """share of replays with at most `NEAR` regret after the budget"""
    first: float
    """share of first picks that are the best of all"""
    first_near: float
    """share of replays with at most `NEAR` regret after the first pick"""
    measured: float
    """mean number of strategies that were measured besides the start"""
    abstained: float
    """share of replays that ended before the budget was spent"""
    infeasible: float
    flips: float
    """mean numbers per replay"""


NEAR = 0.05
"""regret that is as good as none"""


class PolicyComparison(Document):
    """Policies on tables; all empty where the parameters name no table."""

    tables: dict[str, int] = {}
    """timing -> strategies to choose from"""
    reference: str = ""
    """policy that the others are compared with"""
    seeds: int = 0
    summaries: list[Summary] = []
    replays: list[Replay] = []
