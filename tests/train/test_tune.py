"""The search of a method's settings, by losses of a function in place of training."""

import importlib
import itertools
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.models.settings import Model
from shardlab.results.files import read_results, write_results
from shardlab.results.result import Result, only
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from shardlab.train.tune import (
    Run,
    Tuning,
    bracket,
    climb,
    key_of,
    search,
    tune_method,
)
from shardlab.train.tune_settings import Method, Tune
from tests.token_data import write_tokens
from tests.tuned_factory import make_row

ROOT = Path(__file__).parents[2]
RATES = (0.001, 0.002, 0.003, 0.0045, 0.0068)
BETAS = (0.9, 0.95)
MORE_BETAS = ((0.9, 0.9), BETAS, (0.9, 0.99))
DDP = Strategy(engine="ddp")


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_enough_tries_has_no_better_neighbour_on_any_axis(seed: int) -> None:
    """On any losses, also of points that diverge."""
    chance = random.Random(seed)
    sizes = chance.randint(1, 6), chance.randint(1, 4)
    losses = {
        point: chance.choice([chance.random(), math.inf])
        for point in itertools.product(*map(range, sizes))
    }
    start = chance.choice([*losses])
    asked: list[tuple[int, ...]] = []

    def loss_at(point: tuple[int, ...]) -> float:
        asked.append(point)
        return losses[point[0], point[1]]

    best = climb(sizes, start, 100, loss_at)
    assert asked[0] == start and len(asked) == len({*asked})
    near = [p for p in losses if abs(p[0] - best[0]) + abs(p[1] - best[1]) == 1]
    assert {*near} <= {*asked}
    assert all(losses[point] >= losses[best] for point in near)
    # with fewer tries it is the best of the first of them
    for tries in range(1, len(asked)):
        some = climb(sizes, start, tries, lambda point: losses[point[0], point[1]])
        assert losses[some] == min(losses[point[0], point[1]] for point in asked[:tries])


def test_where_runs_diverge_lower_learning_rates_are_tried() -> None:
    assert climb((6,), (4,), 9, lambda point: math.inf if point[0] > 1 else -point[0]) == (1,)


@pytest.mark.parametrize(
    ("loss", "trained"),
    [(2.5, [1000, 1400, 2000]), (4.5, [1000, 700]), (0.1, [1000, 1400, 2000]), (4.0, [1000, 700])],
)
def test_lengths_are_tried_until_the_loss_is_between_two(loss: float, trained: list[int]) -> None:
    losses = {500: 5.0, 700: 4.6, 1000: 4.0, 1400: 3.0, 2000: 2.0, 2800: 1.0}
    asked = []

    def loss_at(steps: int) -> float:
        asked.append(steps)
        return losses[steps]

    around = bracket(1000, [*losses], loss, 2, loss_at)
    assert asked == trained == [*around]
    assert around == {steps: losses[steps] for steps in trained}


def tuning(
    data: Path = Path("data"),
    strategy: Strategy = DDP,
    method: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **changes: Any,
) -> Tuning:
    """A method on two ranks; `changes` are of what is searched."""
    tune = {
        "target_loss": 3.5,
        "learning_rates": RATES,
        "tries": 8,
        "micro_batches": {1: 1, 2: 1, 8: 1.4},
        **changes,
    }
    settings = {"steps": 1000, "warmup_steps": 100, "learning_rate": 0.003, "batch_size": 4}
    return Tuning(
        "stock",
        Method(strategies=("ddp",), **(method or {})),
        strategy,
        Tune(**tune),
        Train(**settings, **(train or {})),
        Model(preset="tiny"),
        (7, 8, 9),
        data,
    )


def loss_of(run: Run) -> float:
    """Best at 0.002 and the last betas; 3.5 after 1,000 steps of two micro-batches."""
    rate = 0.1 * math.log(run.learning_rate / 0.002) ** 2
    tokens = run.steps * run.micro_batches / 2
    return 3.5 - math.log(tokens / 1190) + rate + 0.99 - run.betas[1] + 1e-3 * run.seed


def test_each_number_of_micro_batches_is_tuned_alike_then_lengths_then_seeds() -> None:
    runs = search(tuning(betas=MORE_BETAS), loss_of)
    assert len(runs) == len({*runs})
    # of two ranks: 1 is left out
    assert {run.micro_batches for run in runs} == {2, 8}
    for number, first, longer in (2, 1000, 1400), (8, 350, 500):
        mine = [run for run in runs if run.micro_batches == number]
        tried = [run for run in mine if run.steps == first and run.seed == 7]
        assert (tried[0].learning_rate, tried[0].betas) == (0.003, BETAS)
        assert {run.learning_rate for run in tried} == {0.001, 0.002, 0.003, 0.0045}
        lengths = mine[len(tried) :]
        assert {(run.learning_rate, run.betas) for run in lengths} == {(0.002, MORE_BETAS[2])}
        expected = [(longer, 7)] if number == 2 else [(250, 7)]
        shorter = min(first, expected[0][0])
        expected += [(n, seed) for seed in (8, 9) for n in sorted({shorter, first})]
        assert [(run.steps, run.seed) for run in lengths] == expected


def test_tries_are_as_many_for_every_method_and_number_of_micro_batches() -> None:
    """Where a rate at the end of the grid would be the best, too."""
    for method in {}, {"world_size": 1}:
        many = tuning(method=method, betas=MORE_BETAS, tries=4, lengths=0)
        runs = search(many, lambda run: -run.learning_rate)
        for number in many.method.numbers(many.tune, many.train):
            first = [run for run in runs if run.micro_batches == number and run.seed == 7]
            assert len(first) == 4


def test_a_restricted_method_trains_what_it_names() -> None:
    one = {"micro_batches": (8,), "learning_rates": (0.0045,), "lengths": 0}
    assert search(tuning(method=one), loss_of) == [
        Run(8, 350, 0.0045, BETAS, seed) for seed in (7, 8, 9)
    ]


def test_no_length_is_tried_in_which_copies_never_meet() -> None:
    rare = parse_strategy({"engine": "ddp", "sync": {"every": 600}})
    quick = {"micro_batches": {2: 1}, "target_loss": 9.0, "lengths": 3}
    first = [run for run in search(tuning(strategy=rare, **quick), loss_of) if run.seed == 7]
    assert {run.steps for run in first} == {1000, 700}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    write_tokens(tmp_path / "data" / "tokens", [np.arange(10)], 300)
    return tmp_path / "data"


class Counted:
    """Measures of runs by a function; counts them, and is killed in the one after some."""

    def __init__(self, until: int = 1000) -> None:
        self.plans: list[RunPlan] = []
        self.until = until

    def __call__(self, plan: RunPlan) -> dict[str, Any]:
        if len(self.plans) == self.until:
            raise KeyboardInterrupt
        self.plans.append(plan)
        train = plan.train
        number = train.batch_size * train.world_size // 4
        loss = loss_of(Run(number, train.steps, train.learning_rate, train.betas, plan.seed))
        header = make_row().model_dump(include={*Result.model_fields, "bytes_wire"})
        return {**header, "seed": plan.seed, "val_loss": loss, "val_tokens": 99}


def tuned(
    where: Path, measure: Callable[[RunPlan], dict[str, Any]], of: Tuning
) -> list[TuneResult]:
    output = where / "results.jsonl"
    tune_method(of, output, where / "work", measure)
    return only(read_results(output, "fix"), TuneResult)


def test_a_search_that_was_killed_trains_what_is_missing(data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    all_runs = Counted()
    results = tuned(one, all_runs, tuning(data))
    first, second = Counted(5), Counted()
    with pytest.raises(KeyboardInterrupt):
        tuned(two, first, tuning(data))
    assert not (two / "results.jsonl").exists()
    assert tuned(two, second, tuning(data)) == results
    assert first.plans + second.plans == all_runs.plans
    assert len(all_runs.plans) == len(results) > 10


def test_micro_batches_are_a_larger_batch_of_each_rank(data: Path, tmp_path: Path) -> None:
    measured = Counted()
    results = tuned(tmp_path, measured, tuning(data, train={"accumulation": 4}))
    for plan, result in zip(measured.plans, results, strict=True):
        train = plan.train
        assert train.accumulation == 1
        assert train.batch_size == result.batch_size == 4 * result.micro_batches // 2
        assert result.tokens_per_step == 2 * train.batch_size * train.sequence_length
        # of a schedule of its own
        assert train.warmup_steps == round(train.steps / 10)


def test_results_of_another_revision_are_taken_over_by_what_they_mean(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tuned(tmp_path, Counted(), tuning(data))
    older = [result.model_copy(update={"revision": "0123456789ab"}) for result in results]
    clone = tmp_path / "clone"
    # of a method that had another name, and settings that change no loss
    named = [result.model_copy(update={"run": "former"}) for result in older]
    write_results(clone / "results.jsonl", named)
    same = tuning(data, train={"threads": 2, "timeout_s": 5.0, "link": {"rate": "100mbit"}})
    assert tuned(clone, Counted(0), same) == older
    said = capsys.readouterr().err
    assert f"run {len(older)}: 350 steps of 8 micro-batches" in said
    assert said.count("(taken over from revision 0123456789ab)") == len(older)
    # other settings: all of them again, and those of before are not lost
    other = Counted()
    later = tuned(clone, other, tuning(data, train={"clip": None}))
    assert len(other.plans) == len(later)
    assert {result.key for result in later}.isdisjoint(result.key for result in older)
    assert tuned(clone, Counted(0), same) == older
    assert tuned(clone, Counted(0), tuning(data, train={"clip": None})) == later


@pytest.mark.parametrize(
    "change", [{"learning_rate": 0.01}, {"steps": 7}, {"seed": 3}, {"strategy_hash": "0" * 16}]
)
def test_a_result_with_the_key_of_another_run_is_refused_by_its_place(
    data: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    results = tuned(tmp_path, Counted(), tuning(data))
    (name,) = change
    wrong = [*results[:2], results[2].model_copy(update=change), *results[3:]]
    write_results(tmp_path / "clone" / "results.jsonl", wrong)
    with pytest.raises(UserError, match=rf"results\.jsonl:3: has the key .* {name} .*, and says"):
        tuned(tmp_path / "clone", Counted(0), tuning(data))
    path = tmp_path / "work" / f"{results[1].key}.json"
    results[1].model_copy(update=change).to_file(path)
    with pytest.raises(UserError, match=rf"{path}: has the key of a run with {name}"):
        tuned(tmp_path, Counted(0), tuning(data))


def test_one_run_with_two_losses_is_refused_by_both_places(data: Path, tmp_path: Path) -> None:
    """As where somebody changed one of them."""
    first, *later = tuned(tmp_path, Counted(), tuning(data))
    output = tmp_path / "results.jsonl"
    changed = first.model_copy(update={"val_loss": 1.0})
    write_results(output, [changed, *later])
    with pytest.raises(
        UserError, match=rf"{first.key}\.json: has val_loss .*{output}:1, .* 1\.0: "
    ):
        tuned(tmp_path, Counted(0), tuning(data))
    write_results(tmp_path / "clone" / "results.jsonl", [first, *later, changed])
    with pytest.raises(UserError, match=r"results\.jsonl:\d+: has val_loss 1\.0, and .*:1, of "):
        tuned(tmp_path / "clone", Counted(0), tuning(data))


def test_a_key_names_no_file_elsewhere(data: Path, tmp_path: Path) -> None:
    first, *later = tuned(tmp_path, Counted(), tuning(data))
    wrong = first.model_copy(update={"key": "../outside"})
    write_results(tmp_path / "clone" / "results.jsonl", [wrong, *later])
    with pytest.raises(UserError, match=r"jsonl:1: '\.\./outside' is no key of a run: remove it"):
        tuned(tmp_path / "clone", Counted(), tuning(data))


def test_a_damaged_file_is_named(data: Path, tmp_path: Path) -> None:
    key = tuned(tmp_path, Counted(), tuning(data))[0].key
    write_text(tmp_path / "work" / f"{key}.json", "{")
    with pytest.raises(UserError, match=rf"{key}.json: damaged: .* remove it, and its run is"):
        tuned(tmp_path, Counted(0), tuning(data))


def test_a_run_without_a_loss_is_one_that_others_are_better_than(
    data: Path, tmp_path: Path
) -> None:
    count = Counted()

    def diverging(plan: RunPlan) -> dict[str, Any]:
        lost = {"val_loss": None} if plan.train.learning_rate > 0.001 else {}
        return {**count(plan), **lost}

    results = tuned(tmp_path, diverging, tuning(data, micro_batches={2: 1}))
    assert results[0].val_loss is None
    assert {result.learning_rate for result in results if result.seed == 8} == {0.001}


def test_a_key_is_that_of_what_a_loss_depends_on(data: Path) -> None:
    """The key of a run with default betas is what it was before they could be chosen."""
    model, train = Model(preset="small"), Train(steps=2000, warmup_steps=100)
    plan = RunPlan("stock", 0, DDP, train, model, data)
    assert key_of(plan) == "d7446cde619d3a60"

    def key_with(**changes: object) -> str:
        settings = train.model_copy(update=changes)
        return key_of(RunPlan("other", 0, DDP, settings, model, data))

    assert key_with(betas=(0.9, 0.95), timeout_s=1.0, threads=3) == key_of(plan)
    keys = [key_with(betas=(0.9, 0.999)), key_with(clip=None), key_with(steps=1000)]
    assert len({key_of(plan), *keys}) == 4


@pytest.mark.parametrize("source", ["pretrained", "config"])
def test_the_files_of_a_model_are_a_part_of_the_key(
    data: Path, tmp_path: Path, source: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()

    def key_with(content: str) -> str:
        write_text(folder / "config.json", content)
        model = Model.model_validate({source: str(folder)})
        return key_of(RunPlan("stock", 0, DDP, Train(), model, data))

    assert key_with("{}") == key_with("{}") != key_with("[]")


def test_a_codec_of_the_user_is_a_part_of_the_key(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other revision of it is taken over: nobody else knows what it does."""
    path = tmp_path / "codec_of_a_test.py"
    shutil.copy(ROOT / "user_codecs/ternary.py", path)
    text = path.read_text().replace('"ternary', '"tuned')
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("codec_of_a_test")
    for section in "gradients", "sync":
        sent = {"codec": "tuned", **({"every": 8} if section == "sync" else {})}
        plan = RunPlan(
            "mine",
            0,
            parse_strategy({"engine": "ddp", section: sent}),
            Train(),
            Model(preset="tiny"),
            data,
        )
        path.write_text(text)
        before = key_of(plan)
        path.write_text(f"{text}\n")
        assert key_of(plan) != before
