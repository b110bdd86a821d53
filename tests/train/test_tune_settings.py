import math
from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.train.tune_settings import Method, Tune, lengths_around

ROOT = Path(__file__).parents[2]
TUNE = (
    "{target_loss: 3.5, learning_rates: [0.003, 0.01, 0.03], micro_batches: {1: 1, 2: 1, 6: 1.4}}"
)
METHODS = "{stock: {strategies: [ddp, manual]}, alone: {strategies: [ddp], world_size: 1}}"


def parameters(*overrides: str) -> Parameters:
    tuned = [f"tune={TUNE}", f"methods={METHODS}", "timed_strategies.rare.engine=ddp"]
    return Parameters(ROOT / "params.yaml", [*tuned, *overrides])


def test_numbers_of_micro_batches_are_those_that_the_ranks_divide() -> None:
    tune, methods, train = parameters()("tune", "methods", "train")
    assert methods["stock"].numbers(tune, train) == [2, 6]
    assert methods["alone"].numbers(tune, train) == [1, 2, 6]
    some = methods["alone"].model_copy(update={"micro_batches": (6, 1)})
    assert some.numbers(tune, train) == [1, 6]


def test_first_runs_see_the_tokens_of_a_run_of_train_times_a_factor() -> None:
    # two ranks with one micro-batch, 100 steps
    tune, train = parameters()("tune", "train")
    assert [tune.equal_steps(number, train) for number in (1, 2, 6)] == [200, 100, 33]
    assert [tune.first_steps(number, train) for number in (1, 2, 6)] == [200, 100, 46]
    accumulated = train.model_copy(update={"accumulation": 3})
    assert tune.equal_steps(6, accumulated) == 100


def test_the_search_begins_at_the_rate_of_train_or_the_nearest_that_a_method_has() -> None:
    tune, train = parameters()("tune", "train")
    methods = Method(strategies=("ddp",)), Method(strategies=("ddp",), learning_rates=(0.003, 0.03))
    assert [method.first_rate(tune, train) for method in methods] == [0.01, 0.03]
    assert [method.restrictions for method in methods] == [[], ["learning_rates"]]


def test_a_loss_is_between_those_of_two_neighbours() -> None:
    losses = {4000: 2.0, 1000: math.inf, 2000: 3.0}
    around = [lengths_around(loss, losses) for loss in (3.5, 2.5, 1.9)]
    assert around == [(1000, 2000), (2000, 4000), None]


def test_numbers_that_are_keys_may_be_text_as_in_json() -> None:
    tree = {"target_loss": 3.5, "learning_rates": [0.003], "micro_batches": {"2": 1, "8": 1.4}}
    tune = validate(Tune, tree, "tune")
    assert tune.micro_batches == {2: 1, 8: 1.4}
    assert validate(Tune, tune.model_dump(mode="json"), "tune") == tune


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tune=null", "methods: tune says what they are to reach: add it, or write methods: {}"),
        ("methods={}", "tune: nothing to tune: add methods, such as {stock: {strategies: [ddp]}}"),
        (
            "train.learning_rate=0.02",
            "tune.learning_rates: add that of train, 0.02, to ",
        ),
        (
            "tune.betas=[[0.9, 0.99]]",
            "tune.betas: add those of train, [0.9, 0.95], to begin there",
        ),
        ("tune.learning_rates=[0.01, 0.003]", "tune: learning_rates must ascend"),
        ("tune.betas=[[0.9, 0.95], [0.9, 0.95]]", "tune: betas: two are the same: remove one"),
        (
            "tune.micro_batches={200: 1, 2: 1}",
            "tune.micro_batches.200: the steps of train are too few: remove it",
        ),
        ("methods.stock.micro_batches=[4]", "methods.stock.micro_batches.0: 4 is none of "),
        ("methods.stock.micro_batches=[2, 1]", "methods.stock.micro_batches.1: 2 ranks do not "),
        ("methods.alone.world_size=4", "methods.alone: 4 ranks divide none of "),
        ("methods.stock.learning_rates=[0.02]", "methods.stock.learning_rates.0: 0.02 is none of "),
        ("methods.stock.seeds=[1, 1]", "methods.stock.seeds: a seed is named twice"),
        (
            "methods.stock.seeds=[1, 0]",
            "methods.stock.seeds: begin with 0, by which other methods are tuned",
        ),
        ("methods.stock.learning_rates=[0.01, 0.003]", "methods.stock: learning_rates must ascend"),
        ("methods.stock.micro_batches=[2, 2]", "methods.stock: micro_batches: two are the same: "),
        (
            # of which the losses of one would stand beside the steps of the other
            "timed_strategies.rare.gradients.codec=int4",
            "methods.stock.strategies.1: 'rare' trains otherwise than 'ddp': make it a method of ",
        ),
        ("methods.stock.strategies=[dpd]", "methods.stock.strategies.0: 'dpd' is no strategy; did"),
        ("methods.stock.strategies=[ddp, ddp]", "methods.stock.strategies.1: 'ddp' is named twice"),
        (
            # of the runs with most micro-batches, which have fewest steps
            "timed_strategies.rare.sync={every: 50}",
            "methods.stock.strategies.1.sync: the first exchange is after step 50 of 46: ",
        ),
    ],
)
def test_a_mistake_is_named_by_its_key(override: str, message: str) -> None:
    rare = ["methods.stock.strategies=[ddp, rare]"] if ".rare." in override else []
    with pytest.raises(UserError) as error:
        parameters(override, *rare)
    first = str(error.value).partition("\n")[0]
    assert first.startswith(message)


def test_strategies_of_a_method_may_be_for_timings_alone() -> None:
    assert parameters("methods.stock.strategies=[rare]")("methods.stock").strategies == ("rare",)


INT4 = "gradients: {codec: int4, error_feedback: true}"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("{engine: ddp}", "{engine: fsdp2, param_dtype: bf16}", True),
        ("{engine: ddp}", "{engine: ddp, gradients: {codec: bf16}}", True),
        ("{engine: fsdp2}", "{engine: fsdp2, weights: {codec: bf16}, prefetch: 2}", True),
        (f"{{engine: ddp, {INT4}}}", f"{{engine: ddp, bucket_mb: 1, {INT4}}}", True),
        ("{engine: ddp, sync: {every: 8}}", "{engine: ddp, bucket_mb: 1, sync: {every: 8}}", True),
        ("{engine: fsdp2}", "{engine: fsdp2, weights: {codec: int8}}", False),
        (f"{{engine: ddp, {INT4}}}", "{engine: ddp}", False),
        (f"{{engine: ddp, {INT4}}}", "{engine: ddp, gradients: {codec: int4}}", False),
        ("{engine: ddp, sync: {every: 8}}", "{engine: ddp, sync: {every: 9}}", False),
    ],
)
def test_strategies_of_a_method_train_the_same_up_to_rounding(
    one: str, other: str, alike: bool
) -> None:
    given = [f"timed_strategies={{one: {one}, other: {other}}}"]
    for order in "[one, other]", "[other, one]":
        mistake = ""
        try:
            parameters(*given, f"methods.stock.strategies={order}").complete()
        except UserError as error:
            mistake = str(error)
        assert ("trains otherwise than" in mistake) is not alike, mistake
