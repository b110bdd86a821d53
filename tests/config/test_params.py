import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.results.timing_parts import each_timing
from shardlab.strategy.document import Strategy
from shardlab.train.settings import Train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "params.yaml",
        *(f"params/{name}.yaml" for name in ("quick", "codecs", "links", "gpu")),
    ],
)
def test_provided_files_are_complete(name: str) -> None:
    values = Parameters(ROOT / name).complete()
    assert values.comparison == "two-ranks" and values.agent.start == values.baseline


def test_all_but_what_dvc_interpolates_has_a_default(tmp_path: Path) -> None:
    """The baseline starts the search; the timing of the matrix is compared."""
    path = tmp_path / "params.yaml"
    tree = {
        "strategies": {"one": {"engine": "ddp"}},
        "seeds": [0],
        "baseline": "one",
        "timings": {"alone": {}},
        "rounds": {"1": {"after": "results/results.jsonl"}},
    }
    values = Parameters(write(path, tree)).complete()
    assert (values.comparison, values.agent.start) == ("alone", "one")
    assert (values.forecast.timings, values.forecast.runs) == (("alone",), ("one",))
    for name in tree:
        rest = {key: value for key, value in tree.items() if key != name}
        with pytest.raises(UserError, match=f"{name}: missing from"):
            Parameters(write(path, rest)).complete()


BATCH = ("train.batch_size=null", "train.global_batch_size=24")


def refusal(*overrides: str) -> str:
    """Return the first line of the error about params.yaml with these overrides."""
    with pytest.raises(UserError) as error:
        Parameters(ROOT / "params.yaml", overrides)
    return str(error.value).partition("\n")[0]


@pytest.mark.parametrize(
    "override, message",
    [
        ("trian.steps=5", "trian: unknown key; did you mean 'train'?"),
        ("train.stepz=5", "train.stepz: unknown key; did you mean 'steps'?"),
        ("train.steps=many", "train.steps: input should be a valid integer (found 'many')"),
        (
            "train.world_size=1000000000",
            "train.world_size: input should be less than or equal to 65536 (found 1000000000)",
        ),
        (
            "train={steps: 5, untimed_steps: 5}",
            "train: untimed_steps must be below steps (5)",
        ),
        (
            "train={steps: 9, checkpoint: {every: 10, folder: kept}}",
            "train: checkpoint.every must be at most steps (9), or nothing is kept in kept",
        ),
        (
            "train={batch_size: 8, global_batch_size: 16}",
            "train: name one of batch_size (of a rank and micro-batch) and global_batch_size (of a "
            "step of all ranks): set the other to null, or remove it",
        ),
        (
            "train={global_batch_size: 10, accumulation: 4}",
            "train.global_batch_size: 10 sequences are not divided by 2 ranks x 4 micro-batches: "
            "take 8 or 16",
        ),
        (
            "train={global_batch_size: 1}",
            "train.global_batch_size: 1 sequences are not divided by 2 ranks x 1 micro-batches: "
            "take 2",
        ),
        (
            "strategies.fsdp2-int8.gradients.codec=int9",
            "strategies.fsdp2-int8.gradients.codec: unknown codec 'int9'; did you mean 'int4' "
            "or 'int8'?",
        ),
        (
            "timed_strategies={ddp: {engine: ddp}}",
            "timed_strategies.ddp: 'ddp' is one of strategies, too",
        ),
        (
            "timings.two-ranks.runs=matrx",
            "timings.two-ranks.runs: expected names of strategies, matrix or all (found 'matrx')",
        ),
        ("comparison=two-rank", "comparison: 'two-rank' is no timing; did you mean 'two-ranks'?"),
        ("seeds=[0, 0]", "seeds: a seed is named twice"),
        (
            "data={source: tokens, path: a}",
            "tokenize.tokenizer: name the one that the tokens were made with, or give "
            "tokenize.vocabulary and tokenize.end_of_text, the id that ends documents",
        ),
        ("tokenize.end_of_text=0", "tokenize.end_of_text: is for data.source tokens: remove it"),
        (
            "tokenize.end_of_text=2048",
            "tokenize: end_of_text is for tokens without a tokenizer: give it with a "
            "larger vocabulary, and tokenizer null",
        ),
        (
            "tokenize.vocabulary=65",
            "tokenize: vocabulary: a trained tokenizer has at least 257 tokens",
        ),
        ("data.ids_column=ids", "data: ids_column requires source tokens: remove it"),
        (
            "seeds=[010]",
            "--set seeds: line 1: 010 is one number by YAML 1.1 and another by YAML 1.2, as DVC "
            "reads it: write it without leading zeros and colons",
        ),
        ("rounds.1.search=wan", "rounds.1.search: 'wan' is no search: add it to agent.searches"),
        (
            "rounds.2.after=results/results.jsonl",
            "rounds.2.after: expected 'results/rounds/1/history.json' "
            "(found 'results/results.jsonl')",
        ),
        ("steps", "--set steps: expected key=value, for example train.steps=10"),
        (
            "methods={stock: {strategies: [ddp]}}",
            "methods: tune says what they are to reach: add it, or write methods: {}",
        ),
        (
            "quality.val_loss=[5.5]",
            "quality.val_loss: nothing is evaluated during training: set train.validation.every "
            "to at most 100, or remove it",
        ),
    ],
)
def test_error_names_the_key_and_the_fix(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    "override",
    ["timings.two-ranks.runs=[fsdp2, ddp]", "train.world_size=1", "train.link.rate=1gbit"],
)
def test_compared_steps_are_of_the_matrix_as_it_trains(override: str) -> None:
    """A single stage may still run with other ranks or another link."""
    params = Parameters(ROOT / "params.yaml", [override, "comparison=two-ranks"])
    assert params("train", "timings")
    with pytest.raises(UserError, match="comparison: timing 'two-ranks' has to time all runs"):
        params("comparison")


def test_strategies_that_cannot_take_muon_are_named_before_anything_runs() -> None:
    """A single run of one that can is none of them."""
    params = Parameters(ROOT / "params/quick.yaml", ["train.optimizer=muon"])
    assert params("train").optimizer == "muon"
    with pytest.raises(UserError) as error:
        params.complete()
    assert str(error.value).split("\n") == [
        f"strategies.{name}: train.optimizer: muon needs whole matrices, of which ranks of fsdp2 "
        "keep parts: set engine: ddp, or optimizer: adamw"
        for name in ("fsdp2", "fsdp2-int8")
    ]


def test_a_curve_without_a_point_serves_no_loss() -> None:
    asked = "quality.val_loss=[5.5]", "train.steps=100"
    assert refusal(*asked, "train.validation.every=101").startswith("quality.val_loss: nothing is")
    Parameters(ROOT / "params.yaml", [*asked, "train.validation.every=100"])


def test_names_with_paths_are_refused() -> None:
    assert refusal("strategies.{name}={{}}".format(name="../x")).startswith("strategies")
    assert "pattern" in refusal("strategies.Ünï={}")


def write(path: Path, tree: Any) -> Path:
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_file_with_a_part_of_the_parameters_is_read(tmp_path: Path) -> None:
    """Report a valid key outside of the part as missing."""
    part = {"strategies": {"one": {"engine": "ddp"}}, "seeds": [3]}
    params = Parameters(write(tmp_path / "params.yaml", part))
    strategy, seeds = params("strategies.one", "seeds")
    assert strategy == Strategy(engine="ddp")
    assert seeds == [3]
    with pytest.raises(UserError, match=r"baseline: missing from "):
        params("baseline")
    with pytest.raises(UserError, match=r"strategies\.on: missing from .*; did you mean 'one'"):
        params("strategies.on")


def test_timings_name_the_matrix_or_all_strategies(tmp_path: Path) -> None:
    """Sorted: the order of the file changes no timing. So do timings that others hold."""
    tree = {
        "strategies": {"y": {"engine": "ddp"}, "x": {}},
        "timed_strategies": {"w": {"engine": "manual"}},
        "timings": {"a": {"interleaved": {"b": {"runs": "all"}}}, "c": {"runs": ["y"]}},
        "comparison": "a",
        "forecast": {"timings": ["b"], "runs": ["w"]},
    }
    params = Parameters(write(tmp_path / "params.yaml", tree))
    found = {name: each.runs for name, each in each_timing(params("timings")).items()}
    assert found == {"a": ("x", "y"), "b": ("w", "x", "y"), "c": ("y",)}


@pytest.mark.parametrize(
    "timings, message",
    [
        ("{a: {interleaved: {b: {}}}, b: {}}", "b: timings.a.interleaved.b has the same name"),
        ("{a: {interleaved: {b: {runs: [z]}}}}", "a.interleaved.b.runs.0: 'z' is no strategy"),
        ("{a: {runs: [odd], accumulation: 2}}", "a.runs.0: accumulation: 3 micro-batches do not"),
        ("{a: {interleaved: {b: {interleaved: {}}}}}", "a.interleaved.b.interleaved: unknown key"),
    ],
)
def test_mistakes_in_interleaved_timings_are_named(timings: str, message: str) -> None:
    odd = "timed_strategies.odd={engine: ddp, accumulation: 3}"
    assert refusal(f"timings={timings}", odd).startswith(f"timings.{message}")


def test_a_timing_with_other_micro_batches_is_neither_compared_nor_fitted() -> None:
    """Its steps are no steps of the training runs; one with as many is like one without."""
    many = "timings={a: {accumulation: 2}, b: {accumulation: 1}}"
    params = Parameters(ROOT / "params.yaml", [many, "forecast.timings=[b]"])
    assert params("comparison") == "b"
    assert refusal(many, "forecast.timings=[a]") == (
        "forecast.timings.0: 'a' has 2 micro-batches per step, train 1: name a timing that has as "
        "many"
    )


def test_json_is_read_as_json(tmp_path: Path) -> None:
    """Use tabs and 1e-3, which PyYAML reads as an error and as text."""
    tree = {"train": {"learning_rate": 1e-3}, "seeds": [3]}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tree, indent="\t").replace("0.001", "1e-3"))
    params = Parameters(path, ["train.weight_decay=1e-2", "data={source: synthetic}"])
    train, seeds, data = params("train", "seeds", "data")
    assert (train.learning_rate, train.weight_decay, seeds) == (1e-3, 1e-2, [3])
    assert data.source == "synthetic"


def test_betas_are_two_decays_below_one() -> None:
    params = Parameters(ROOT / "params.yaml", ["train.betas=[0.8, 0.99]"])
    assert params("train").betas == (0.8, 0.99)
    for wrong, place in (("[0.9, 1.0]", "1"), ("[-0.1, 0.9]", "0"), ("[0.9]", "1")):
        assert refusal(f"train.betas={wrong}").startswith(f"train.betas.{place}: ")


def test_results_from_before_a_setting_are_those_of_its_default() -> None:
    results = Train().meaning()
    assert Train(betas=(0.9, 0.95), deterministic=False, timeout_s=7).meaning() == results
    added = {"betas", "deterministic", "global_batch_size", "optimizer", "validation"}
    assert not added & results.keys()
    assert results["batch_size"] == 8
    assert Train(validation={"every": 5}).meaning()["validation"] == {"every": 5, "sequences": None}
    assert Train(betas=(0.9, 0.999)).meaning() == {**results, "betas": [0.9, 0.999]}
    assert Train(deterministic=True).meaning() == {**results, "deterministic": True}


def test_a_batch_of_all_ranks_is_divided_by_ranks_and_micro_batches() -> None:
    train = Parameters(ROOT / "params/quick.yaml", BATCH)("train")
    steps = train.step_size(2), train.step_size(1), train.step_size(4, 3)
    assert [(step.batch_size, step.accumulation) for step in steps] == [(12, 1), (24, 1), (2, 3)]
    # as canonical parameters are written, and read again
    assert Train(**train.model_dump(mode="json")) == Train(**train.meaning()) == train
    assert Train(batch_size=12).step_size(7).samples == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "timings.five-ranks={world_size: 5}",
            "timings.five-ranks: train.global_batch_size: 24 sequences are not divided by 5 ranks "
            "x 1 micro-batches: take 20 or 25",
        ),
        (
            "agent.world_size=4",
            "train.global_batch_size: tune, and a search on other ranks, need train.batch_size in "
            "its place: 12",
        ),
        (
            "forecast.timings=[two-ranks, one-rank]",
            "forecast.timings.1: by train.global_batch_size a rank of 'one-rank' has other "
            "samples than one of 'two-ranks': name timings on 2 ranks alone",
        ),
    ],
)
def test_what_needs_equal_batches_of_ranks_says_which_to_name(override: str, message: str) -> None:
    assert refusal(*BATCH, "forecast.timings=[two-ranks]", override) == message


def test_timings_are_read_where_no_strategy_is_known(tmp_path: Path) -> None:
    """A file may hold a part of the parameters."""
    path = tmp_path / "params.yaml"
    path.write_text("timings: {a: {interleaved: {b: {world_size: 4}}}}")
    found = each_timing(Parameters(path)("timings"))
    assert {name: each.world_size for name, each in found.items()} == {"a": 2, "b": 4}


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        (
            {
                "agents": {},
                "train": {"stepz": 5, "batch_size": 0, "link": "fast"},
                "timings": {"a": {"rounds": 3}},
            },
            [
                "agents: unknown key; did you mean 'agent'?",
                "train.stepz: unknown key; did you mean 'steps'?",
                "train.batch_size: input should be greater than or equal to 1 (found 0)",
                "train.link.rate: link rate 'fast': write a number and its unit, such as 100mbit "
                "or 1gbit",
                "timings.a.rounds: unknown key; did you mean 'runs'?",
            ],
        ),
        (
            {
                "strategies": {"one": {"engine": "ddp"}},
                "seeds": [0, 0],
                "baseline": "first",
                "timings": {"a": {"runs": ["on", "one"], "world_size": 3}},
                "rounds": {"2": {"after": "results/results.jsonl"}},
            },
            [
                "baseline: 'first' is no run; valid: one",
                "timings.a.runs.0: 'on' is no strategy; did you mean 'one'?",
                "seeds: a seed is named twice",
                "rounds.2: expected round '1' here: count up from '1'",
            ],
        ),
    ],
)
def test_all_mistakes_are_named_a_line_each(
    tmp_path: Path, tree: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        Parameters(write(tmp_path / "params.yaml", tree))
    assert str(error.value).split("\n") == lines


def test_all_missing_sections_are_named_with_an_example(tmp_path: Path) -> None:
    """Which works when it is added."""
    with pytest.raises(UserError) as error:
        Parameters(write(tmp_path / "params.yaml", "seeds: [3]")).complete()
    lines = str(error.value).split("\n")
    found = [line.partition(": missing from ")[::2] for line in lines]
    assert [name for name, _ in found] == ["baseline", "rounds", "strategies", "timings"]
    added = [rest.partition(": add it, such as ")[2] for _, rest in found]
    path = write(tmp_path / "params.yaml", "\n".join(["seeds: [3]", *added]))
    assert Parameters(path).complete().baseline == "fsdp2"
