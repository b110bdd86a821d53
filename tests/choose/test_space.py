"""The grid and its feasible strategies: legal, unique, within memory by the formula."""

from collections import Counter

import pytest

from shardlab.choose.space import (
    Feasible,
    drop_short_sync,
    feasible,
    formula_bytes,
    grid_documents,
    memory_saving_levels,
)
from shardlab.core.errors import UserError
from shardlab.models.memory import CUBLAS_WORKSPACE, host_memory
from shardlab.predict.settings import Space
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.strategy.validation import check_fits
from tests.choose.machine import ENDLESS, SPACE, Shapes

SHAPES = Shapes()
NOTHING = Space(gradients=(), weights=(), sync=())
SAVING = ("activation_checkpointing", "accumulation")


def formula_of(ranks: int):
    return lambda strategy: formula_bytes(strategy, SHAPES, ranks)


def strategies_of(ranks: int, limit: int = ENDLESS, space: Space = NOTHING) -> list[Feasible]:
    return [*feasible(space, SHAPES, ranks, formula_of(ranks), limit, Counter())]


def without_saving(strategy: CanonicalStrategy) -> CanonicalStrategy:
    form = strategy.model_dump(mode="json", exclude={*SAVING})
    return parse_strategy(form).canonical()


@pytest.mark.parametrize(("ranks", "limit"), [(1, 20_000_000), (6, 12_000_000)])
def test_all_that_is_feasible_is_legal_new_and_saves_only_the_memory_that_it_must(ranks, limit):
    strategies = strategies_of(ranks, limit)
    assert len({option.hash for option in strategies}) == len(strategies)
    levels = [
        parse_strategy({"engine": "ddp", **level}) for level in memory_saving_levels(SHAPES.samples)
    ]
    order = [tuple(getattr(option, key) for key in SAVING) for option in levels]
    plain = set()
    for option in strategies[::17]:
        check_fits(option.strategy, ranks, SHAPES.samples)
        form = option.strategy.model_dump(mode="json")
        assert option.strategy == parse_strategy(form).canonical()
        assert option.hash == option.strategy.hash()
        assert option.memory_bytes == formula_of(ranks)(option.strategy) <= limit
        fastest = without_saving(option.strategy)
        assert fastest.hash() not in plain, "one level is enough"
        plain.add(fastest.hash())
        level = order.index(tuple(getattr(option.strategy, key) for key in SAVING))
        if level:
            form = fastest.model_dump(mode="json", exclude={*SAVING})
            cheaper = parse_strategy(
                form | memory_saving_levels(SHAPES.samples)[level - 1]
            ).canonical()
            assert formula_of(ranks)(cheaper) > limit


def test_counts_add_up_and_the_order_is_fixed():
    count, again = Counter(), Counter()
    limit = 20_000_000
    first = [*feasible(NOTHING, SHAPES, 4, formula_of(4), limit, count)]
    assert first == [*feasible(NOTHING, SHAPES, 4, formula_of(4), limit, again)]
    assert count == again
    assert count["strategies"] == len(first) + count["spared"] + count["beyond_memory"]
    everything = Counter()
    assert [*feasible(NOTHING, SHAPES, 4, formula_of(4), ENDLESS, everything)]
    assert everything["strategies"] == count["strategies"], "memory makes nothing illegal"
    assert count["spared"] > 0 < count["beyond_memory"]


def test_every_engine_with_all_of_its_values_is_there():
    strategies = [option.strategy for option in strategies_of(4, space=SPACE)]
    assert {option.engine for option in strategies} == {*ENGINES}
    values = {
        name: {getattr(option, name) for option in strategies}
        for name in ("wrap", "bucket_mb", "sharding", "replicas", "window", "prefetch")
    }
    assert values["wrap"] == {None, "block", "root"}
    assert values["bucket_mb"] == {None, 1.0, 5.0, 25.0, 100.0}
    assert values["sharding"] >= {"full_shard", "no_shard", "hybrid_shard"}
    assert values["replicas"] == {None, 2}
    assert values["window"] == {None, 2}
    assert values["prefetch"] >= {0, 1, 2}
    codecs = {
        (option.gradients.codec.name, option.weights and option.weights.codec.name)
        for option in strategies
    }
    assert codecs == {
        (gradients, weights)
        for gradients in ("none", "int8", "int4", "topk")
        for weights in (None, "int8")
    }


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.02), (8, 0.06)])
def test_sync_of_the_default_space_adds_few_strategies(ranks, share):
    spaces = [
        [option.strategy for option in strategies_of(ranks, space=space)]
        for space in (Space(sync=()), Space())
    ]
    with_sync = [option for option in spaces[1] if option.sync is not None]
    assert len(spaces[0]) == len(spaces[1]) - len(with_sync) > len(with_sync) / share
    assert {option.sync.every for option in with_sync} == {8, 32}
    assert {option.engine for option in with_sync} == {
        name for name, traits in ENGINES.items() if "sync" in traits.settings
    }
    assert all(option.gradients.plain() and option.weights is None for option in with_sync)


def test_what_training_is_too_short_for_is_left_out_and_named():
    """Of the default space 100 steps have 12 synchronisations, and 3."""
    assert drop_short_sync(Space(), 100)[1] == (
        "sync every=8 (12), every=32 (3): training runs of 100 steps synchronise fewer than 30 "
        "times"
    )
    assert drop_short_sync(Space(), 0)[1] == (
        "sync every=8, every=32: the training runs have other ranks than the search"
    )
    assert drop_short_sync(Space(), 960) == (Space(), "")


@pytest.mark.parametrize(
    ("layers", "missing"), [(1, {"fsdp2", "manual"}), (2, {"manual"}), (3, {})]
)
def test_the_last_half_of_the_layers_may_stay_gathered_where_it_would_not_anyway(layers, missing):
    engines = {
        option["engine"] for option in grid_documents(NOTHING, layers, 2) if "overrides" in option
    }
    assert engines == {name for name in ENGINES if ENGINES[name].unit_overrides}.difference(missing)


def test_a_model_that_a_strategy_does_not_fit_leaves_it_out():
    def peak(strategy: CanonicalStrategy) -> int:
        if strategy.engine != "ddp":
            raise UserError("no such layer")
        return 1

    strategies = [*feasible(NOTHING, SHAPES, 2, peak, ENDLESS, Counter())]
    assert {option.strategy.engine for option in strategies} == {"ddp"}


def test_states_in_host_memory_need_none_of_a_gpu():
    slide = parse_strategy({"engine": "slide"}).canonical()
    shapes = Shapes()
    on_host = formula_bytes(slide, shapes, 2)
    shapes.on_gpu = True
    on_gpu = formula_bytes(slide, shapes, 2)
    states = sum(host_memory(slide, shapes.sizes(slide), 2).values())
    assert states > 0 and on_gpu == on_host - states + CUBLAS_WORKSPACE
