"""What an experiment takes is said before it runs, as far as it is known."""

import json
from pathlib import Path

from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.config.run_record import write_records
from shardlab.config.timing_record import NO_COMMUNICATION, write_timings
from shardlab.forecast.announcement import announcement
from shardlab.models.shapes import PUBLISHED
from tests.record_factory import HOST, make_records
from tests.timed_run_factory import make_timed

ROOT = Path(__file__).parents[2]
PARAMETERS = 276_096


def quick(*overrides: str) -> Params:
    return Parameters(ROOT / "params/quick.yaml", overrides).complete()


def announced(params: Params, folder: Path, **jobs: list[dict[str, str]]) -> list[str]:
    return announcement(params, jobs or None, folder, HOST)


def test_a_first_run_says_what_follows_from_the_parameters(tmp_path: Path) -> None:
    """An uncompressed step of two ranks sends at least 4 bytes per parameter, here 3 times at 100
    Mbit/s."""
    least = 3 * 4 * PARAMETERS * 8 / 100e6
    assert announced(quick(), tmp_path) == [
        "model tiny: 0.28 million parameters with 512 tokens",
        "2 training runs of 12 steps, 2 timings, 1 race",
        f"at least {least:.2g} s of steps, by the bytes of uncompressed gradients over their link",
        "2 trained models: 2 MB on disk",
    ]


def test_steps_are_those_of_earlier_results_with_the_same_model_and_samples(tmp_path: Path) -> None:
    params = quick("train.batch_size=8", "train.sequence_length=64", "train.steps=996")
    size = PARAMETERS + 32 * 96  # more positions
    records = make_records(["fsdp2", "fsdp2-int8"], seeds=1)
    own = {"model": "tiny", "parameters": size, "step_ms_mean": 500.0}
    write_records(tmp_path / "results.jsonl", [r.model_copy(update=own) for r in records])
    runs = ["fsdp2", "fsdp2-int8", NO_COMMUNICATION]
    timed = [make_timed("slow", run, step_ms=[2000.0], parameters=size) for run in runs]
    (tmp_path / "timings").mkdir()
    write_timings(tmp_path / "timings/slow.jsonl", timed)
    jobs = {
        "train": [{"run": run, "seed": "0"} for run in params.strategies],
        "timing": [{"timing": "link-100mbit"}],
        "report": [{}],
    }
    lines = announced(params, tmp_path, **jobs)
    # 996 steps, one that is audited and one that is traced, of two runs; 3 repetitions of three
    seconds = 2 * 998 * 0.5 + 3 * 3 * 2.0
    assert lines[1:3] == [
        "4 jobs, 2 training runs of 996 steps, 1 timing",
        f"{seconds / 60:.0f} minutes of steps, as in earlier results of this machine",
    ]
    assert len(lines) == 4
    elsewhere = announcement(params, jobs, tmp_path, {**HOST, "cores": 3})
    assert elsewhere[2].startswith("at least ") and len(elsewhere) == 4
    other = quick("train.batch_size=4", "train.sequence_length=64")
    assert not any("earlier results" in line for line in announced(other, tmp_path, **jobs))


def test_runs_too_short_for_their_codec_are_named(tmp_path: Path) -> None:
    """12 steps at a density of 5 %."""
    codec = "strategies.fsdp2-int8.gradients.codec=topk:density=0.05"
    (line,) = [each for each in announced(quick(codec), tmp_path) if each.startswith("warning")]
    assert line.startswith("warning: fsdp2-int8: topk:density=0.05 sends at most 60 % of")
    assert not any(
        "warning" in each for each in announced(quick(codec, "train.steps=20"), tmp_path)
    )


def test_a_configuration_says_how_many_parameters_there_are(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt2"]))
    first = announced(quick(f"model={{config: {config}}}"), tmp_path)[0]
    assert first == f"model {config}: 124 million parameters"


def test_jobs_without_steps_are_counted(tmp_path: Path) -> None:
    assert announced(quick(), tmp_path, report=[{}], collect=[{}]) == ["2 jobs"]
