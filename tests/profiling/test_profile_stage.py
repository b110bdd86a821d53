import pytest

from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.experiment.parameters import Parameters
from shardlab.profiling.capture.merge import merge_traces
from shardlab.records.run import Breakdown
from stages.profile import main
from tests.trace_factory import WORKER, event, label, step, write_rank


@pytest.fixture
def params(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("params.yaml").write_text("{}\n")
    return Parameters("params.yaml")


def test_a_run_gets_its_breakdown(params, tmp_path):
    events = [*step(1, 0, 1000), event("aten::mm", 0, 500)]
    one = write_rank(tmp_path / "0.json", [*events, label("gloo:all_reduce", 400, 600, WORKER)])
    merge_traces([one], "results/train/ddp/seed3/trace.json.gz")
    main(params, "ddp", "3")
    breakdown = validate(Breakdown, read_json("results/profile/ddp/seed3.json"), "profile")
    assert breakdown.overlap == pytest.approx(0.5)


def test_without_a_trace_nothing_is_written(params, tmp_path):
    with pytest.raises(UserError, match="no such trace"):
        main(params, "ddp", "3")
    with pytest.raises(UserError, match="seed: expected a whole number"):
        main(params, "ddp", "three")
    assert not (tmp_path / "results").exists()
