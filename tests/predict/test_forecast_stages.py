import csv

import pytest

from shardlab.codecs.registry import make_codec
from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.predict.calibrate import SIZES, calibrate
from shardlab.predict.codec_costs import ELEMENTS, codecs_of
from shardlab.predict.machine import fit_machine
from shardlab.predict.results import ForecastDocument
from shardlab.predict.settings import Forecast, Space
from shardlab.results.calibration_record import Calibration, memory_operations
from shardlab.results.files import write_results
from shardlab.strategy.document import parse_strategy
from stages import calibrate as calibrate_stage
from stages import forecast
from stages.sections import Sections
from tests.predict.timing_factory import INT8, made_calibration, made_timings

RUNS = ["ddp", "fsdp2", "fsdp2-int8", "manual", "manual-int8"]
NAMES = ["one-rank", "two-ranks", "four-ranks", "slow", "fast"]
PARAMS = {
    "timings": {name: {"runs": RUNS} for name in NAMES},
    "forecast": {
        "timings": ["one-rank", "two-ranks", "slow"],
        "runs": ["ddp", "fsdp2", "manual"],
        "ranks": [8, 1024],
        "links": ["ethernet-10g", "dgx-h100"],
    },
}


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """A project that has everything a forecast needs."""
    monkeypatch.chdir(tmp_path)
    write_json("params.yaml", PARAMS)
    made_calibration().to_file("results/calibration.json")
    runs = made_timings()
    for name in NAMES:
        write_results(f"results/timings/{name}.jsonl", [r for r in runs if r.timing == name])
    return tmp_path


def test_a_forecast_warns_of_disturbed_timings_and_of_other_machines(timed, capsys):
    calm = made_calibration().model_dump(mode="json")
    Calibration(**{**calm, "contention": {"foreign": 0.4, "stolen": 0.0}}).to_file(
        "results/calibration.json"
    )
    elsewhere = [
        run.model_copy(update={"contention": None, "torch": "2.12.0"})
        for run in made_timings()
        if run.timing == "slow"
    ]
    write_results("results/timings/slow.jsonl", elsewhere)
    forecast.main(Sections())
    found = ForecastDocument.from_file(timed / "results/forecast/forecast.json", "")
    other, *disturbed = found.warnings
    assert "torch 2.13.0+cpu, timings slow of " in other and "torch 2.12.0: measure" in other
    assert disturbed == [
        "calibration: others used 40 % of its CPUs during it",
        "timing slow: the load of others during it is unknown",
    ]
    assert f"forecast: warning: {disturbed[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "size"),
    [({"accumulation": 4}, "4 x 8 sequences"), ({"batch_size": 4}, "1 x 4 sequences")],
)
def test_timings_with_other_micro_batches_are_left_out_by_name(timed, change, size):
    runs = [run for run in made_timings() if run.timing == "slow"]
    more = [run.model_copy(update=change) for run in runs]
    write_results("results/timings/slow.jsonl", more)
    forecast.main(Sections(overrides=["forecast.timings=[one-rank, two-ranks]"]))
    found = ForecastDocument.from_file(timed / "results/forecast/forecast.json", "")
    assert "slow" not in {check.timing for check in found.checks}
    assert found.left_out["timing slow"] == (
        f"its steps have other micro-batches ({size}) than those of the model (1 x 8 sequences)"
    )


def test_forecast_stage_writes_all_files_the_same_each_time(timed):
    folder, files = timed / "results/forecast", []
    for _ in range(2):
        forecast.main(Sections())
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    found = ForecastDocument.from_file(folder / "forecast.json", "")
    assert found.summary is not None and found.summary.runs == 16
    assert found.left_out == {}
    assert len(found.points) == 5 * 2 * 2
    with (folder / "checks.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found.checks) == 25


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("timings/slow.jsonl", None, r"slow\.jsonl: no such file: run shardlab timing"),
        ("calibration.json", "{}", r"calibration\.json.*: run shardlab calibrate"),
    ],
)
def test_a_missing_or_invalid_file_names_its_stage(timed, file, text, complaint):
    path = timed / "results" / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        forecast.main(Sections())


def test_calibration_measures_operations_codecs_and_memory_on_real_ranks(
    tmp_path, monkeypatch, capfd
):
    """With error feedback a sparse codec sends other elements each time. One that fails is named
    and left out."""

    def fails(*_):
        raise ArithmeticError("wrong on purpose")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(make_codec("bf16")), "encode", fails)
    codecs = [(INT8, False), ("topk:density=0.05", True), ("threshold:threshold=0.001", True)]
    codecs.insert(1, ("bf16", False))
    memory = memory_operations(parse_strategy({"engine": "slide"}).canonical())
    found = calibrate([2], codecs, threads=1, timeout_s=60, repetitions=2, memory=memory)
    named = "crashed: codec bf16 in calibrate: ArithmeticError: wrong on purpose; no forecast"
    assert capfd.readouterr().err.count(named) == 1
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    assert len(found.transfers) == 4 * len(SIZES)
    for cost in found.transfers:
        twice = cost.operation in ("all_reduce", "reduce_scatter")
        assert cost.wire_bytes == cost.nbytes / 2 * (1 + twice)
    assert len(found.codecs) == 3 * len(ELEMENTS)
    for cost in found.codecs:
        if cost.codec == INT8:
            assert cost.payload_bytes == cost.elements * (1 + 2 / 128)
        else:
            sent = 0.05 * cost.elements
            assert 4 * sent < cost.payload_bytes < 8 * sent + 64
    assert ("update", 28 << 20) in {(cost.operation, cost.nbytes) for cost in found.memory}
    machine = fit_machine(found)
    assert machine.transport["gather"].beta >= 0
    assert list(machine.memory) == memory and machine.memory["copy"].at(1e6) > 0


def test_codecs_to_calibrate_are_unique():
    strategies = [
        {"engine": "fsdp2"},
        {"engine": "fsdp2", "gradients": {"codec": "int8:group=128"}},
        {"engine": "manual", "gradients": {"codec": "int8:group=128"}, "weights": {"codec": "fp8"}},
        {"engine": "fsdp2", "gradients": {"codec": "int8:group=128", "error_feedback": True}},
        {"engine": "fsdp2", "gradients": {"codec": "powersgd:rank=2"}},
        {"engine": "ddp", "sync": {"every": 4, "codec": "int4", "error_feedback": True}},
    ]
    space = Space.model_validate(
        {
            "gradients": [{"codec": "int8:group=128"}, {"codec": "bf16"}],
            "weights": ["fp8"],
            "sync": [{"every": 4}, {"every": 4, "codec": "efsign"}],
        }
    )
    found = codecs_of([parse_strategy(each).canonical() for each in strategies], space)
    names = [codec.partition(":")[0] + "+" * feedback for codec, feedback in found]
    assert names == ["int8", "int8+", "powersgd", "bf16", "int4+", "efsign", "fp8"]
    by_default = codecs_of([], Forecast.model_validate(PARAMS["forecast"]).space)
    assert ("topk:density=0.01", True) in by_default and ("int8:group=128", False) in by_default


def test_a_codec_that_loses_elements_is_refused_for_weights():
    with pytest.raises(ValueError, match="'topk' is for gradients: weights need every element"):
        Space.model_validate({"weights": ["topk:density=0.01"]})


def test_calibration_without_several_ranks_is_refused(timed):
    alone = {"alone": {"runs": ["ddp"], "world_size": 1}}
    known = {**PARAMS["forecast"], "timings": ["alone"], "runs": ["ddp"]}
    strategies = {"ddp": {"engine": "ddp"}}
    params = {"timings": alone, "forecast": known, "strategies": strategies, "train": {}}
    write_json("params.yaml", params)
    with pytest.raises(UserError, match=r"forecast\.timings: none of them has several ranks"):
        calibrate_stage.main(Sections())
