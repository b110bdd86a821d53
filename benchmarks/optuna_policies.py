"""Optuna's samplers as policies: they choose settings, of which a table holds some combinations.

Optuna is not part of the environment: `make rivals` installs it.
"""

import random
import sys
from pathlib import Path
from typing import Any

from shardlab.agent.policies.policy import Choice, Known, Policy
from shardlab.agent.policies.replay import Table
from shardlab.agent.proposals.changes import settings

SAMPLERS = ("tpe", "gp")
_STARTUP = 3
"""random trials before a sampler's model; Optuna's 10 are more than the whole budget"""


class OptunaPolicy(Policy):
    """A sampler over the settings that differ in a table, each of them categorical.

    A proposal that is no new strategy of the table is infeasible; the nearest new one, by the
    number of settings, is measured in its place, and it is what the sampler is told.
    """

    def __init__(self, name: str, table: Table, seed: int, packages: Path) -> None:
        self.name, self._random = name, random.Random(seed)
        optuna = _import(packages)
        samplers = optuna.samplers
        sampler = (
            samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
            if name == "tpe"
            else samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP)
        )
        self._optuna, self._study = optuna, optuna.create_study(sampler=sampler)
        forms = {key: settings(each) for key, each in table.strategies.items()}
        names = [*next(iter(forms.values()))]
        # as text, because optuna's categories are plain values that differ
        values = {n: sorted({str(form[n]) for form in forms.values()}) for n in names}
        self._space = {
            n: optuna.distributions.CategoricalDistribution(known)
            for n, known in values.items()
            if len(known) > 1
        }
        self._forms = {key: {n: str(form[n]) for n in self._space} for key, form in forms.items()}
        self._told: set[str] = set()

    def choose(self, known: Known) -> Choice:  # noqa: D102
        for key, ratio in known.ratios.items():
            if key not in self._told:
                self._told.add(key)
                self._study.add_trial(self._trial(key, ratio))
        trial = self._study.ask(self._space)
        asked: dict[str, Any] = trial.params
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        far = {
            key: sum(self._forms[key][n] != value for n, value in asked.items())
            for key in known.new
        }
        least = min(far.values())
        nearest = [key for key, count in far.items() if count == least]
        return Choice(self._random.choice(nearest), infeasible=int(least > 0))

    def _trial(self, key: str, ratio: float) -> Any:
        create = self._optuna.trial.create_trial
        return create(params=self._forms[key], distributions=self._space, value=ratio)


def _import(packages: Path) -> Any:
    if not (packages / "optuna").is_dir():
        raise SystemExit(f"{packages}: no Optuna there: run make rivals")
    if str(packages) not in sys.path:
        sys.path.append(str(packages))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
