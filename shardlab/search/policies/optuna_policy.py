"""Optuna's samplers as policies: they choose settings; a table holds some combinations of these."""

import random

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.search.changes import aspects, changes, in_words
from shardlab.search.policies.policy import Choice, Known, Policy
from shardlab.search.policies.replay import Table

SAMPLERS = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
_STARTUP = 3
"""random trials before a sampler's model; Optuna's 10 are more than the whole budget"""


class OptunaPolicy(Policy):
    """A sampler over four categories: engine, sharding, gradients and weights.

    A proposal that is no new strategy of the table is infeasible; one of the nearest new ones, by
    the number of categories, is measured in its place, and it is what the sampler is told.
    """

    def __init__(self, name: str, table: Table, seed: int) -> None:
        self.name, self._random = name, random.Random(seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = SAMPLERS[name](seed=seed, n_startup_trials=_STARTUP)
        self._study = optuna.create_study(sampler=sampler)
        self._forms = {key: _categories(each) for key, each in table.strategies.items()}
        self._space: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(sorted({form[name] for form in self._forms.values()}))
            for name in next(iter(self._forms.values()))
        }
        self._told: set[str] = set()

    def choose(self, known: Known) -> Choice:  # noqa: D102
        for key, ratio in known.ratios.items():
            if key not in self._told:
                self._told.add(key)
                self._study.add_trial(self._trial(key, ratio))
        trial = self._study.ask(self._space)
        self._study.tell(trial, state=TrialState.FAIL)
        far = {
            key: sum(self._forms[key][n] != value for n, value in trial.params.items())
            for key in known.new
        }
        least = min(far.values())
        nearest = [key for key, count in far.items() if count == least]
        return Choice(self._random.choice(nearest), infeasible=int(least > 0))

    def _trial(self, key: str, ratio: float) -> FrozenTrial:
        return create_trial(params=self._forms[key], distributions=self._space, value=ratio)


def _categories(strategy: CanonicalStrategy) -> dict[str, str]:
    """Return the engine, and in words what of each aspect is not the engine's default."""
    default = parse_strategy({"engine": strategy.engine}).canonical()
    found = dict.fromkeys(("sharding", "gradients", "weights"), "")
    for change in changes(default, strategy):
        (aspect,) = aspects((change,))
        found[aspect] += f"{in_words((change,))}; "
    return {"engine": strategy.engine, **found}
