"""The table of `params/search.yaml`: the strategies of its rule, on held-out workloads."""

from benchmarks.search_table import strategies, trained
from shardlab.config.engine_traits import ENGINES
from shardlab.config.parameters import Parameters
from shardlab.config.strategy import parse_strategy
from shardlab.config.validation import check_fits
from tests.pipeline.workspace import ROOT

PARAMS = Parameters(ROOT / "params/search.yaml")
MATRIX, TIMED = PARAMS("strategies", "timed_strategies")
TABLE = {**MATRIX, **TIMED}


def test_the_table_holds_what_its_rule_says():
    made = strategies()
    assert [*MATRIX] == [name for name in made if trained(made[name])]
    assert [*TIMED] == [name for name in made if not trained(made[name])]
    assert all(TABLE[name].hash() == parse_strategy(each).hash() for name, each in made.items())


def test_its_strategies_are_legal_distinct_and_of_all_engines_and_codecs():
    forecast, train = PARAMS("forecast", "train")
    assert len(TABLE) >= 60
    assert len({each.hash() for each in TABLE.values()}) == len(TABLE)
    for each in TABLE.values():
        for ranks in (2, 4):
            check_fits(each.canonical(), ranks, train.batch_size * train.accumulation)
    assert {each.engine for each in TABLE.values()} == {*ENGINES}
    codecs = {each.gradients.codec for each in TABLE.values()}
    assert codecs >= {each.codec for each in forecast.space.gradients}


def test_its_workloads_are_none_that_the_forecast_is_fitted_on():
    timings, forecast = PARAMS("timings", "forecast")
    tables = {name: each for name, each in timings.items() if {*each.runs} == {*TABLE}}
    assert len({(each.world_size, each.link) for each in tables.values()}) == len(tables) >= 4
    assert {*tables} == {*PARAMS("policies").timings}
    assert not {*tables} & {*forecast.timings}
    # the quality of every codec is known, so that no strategy is left out for ignorance
    codecs = {each.gradients.codec for each in MATRIX.values()}
    assert codecs == {each.gradients.codec for each in TABLE.values()}
