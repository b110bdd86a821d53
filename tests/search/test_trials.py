import pytest

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import parse_strategy
from shardlab.core.errors import UserError
from shardlab.search.trials import Runs, TrialFailed, code_digest, run_trial, trial_key
from tests.record_factory import make_record

STRATEGY = parse_strategy({"wrap": "root"})


class Measuring:
    """Counts the calls; fails at `fails_at` where that is given."""

    def __init__(self, fails_at: int | None = None, kind: str = "crash") -> None:
        self.seeds: list[int] = []
        self._fails_at, self._kind = fails_at, kind

    def __call__(self, seed, folder, left_s):
        assert folder.is_dir() and not list(folder.iterdir())
        assert left_s > 0
        (folder / "trace").write_text("large")
        self.seeds.append(seed)
        if seed == self._fails_at:
            raise TrialFailed(self._kind, "rank 1: no more memory")
        return make_record("fsdp2", seed)


def run(store, measure, limit_s=300.0, seeds=(0, 1, 2), hopeless_from=4):
    def hopeless(records):
        return len(records) >= hopeless_from

    return run_trial(STRATEGY, "a" * 64, list(seeds), limit_s, store, measure, hopeless)


def test_successful_trial_is_measured_once(tmp_path):
    first, second = Measuring(), Measuring()
    trial = run(tmp_path, first)
    assert (trial.outcome, first.seeds) == ("ok", [0, 1, 2])
    assert [each.seed for each in trial.records] == [0, 1, 2]
    assert run(tmp_path, second) == trial
    assert second.seeds == []


def test_a_hopeless_trial_ends_and_goes_on_where_there_is_hope(tmp_path):
    first, second, third = Measuring(), Measuring(), Measuring()
    trial = run(tmp_path, first, hopeless_from=2)
    assert (trial.outcome, first.seeds, len(trial.records)) == ("ok", [0, 1], 2)
    assert run(tmp_path, second, hopeless_from=2) == trial
    assert second.seeds == []
    # such as with a larger tolerance
    assert run(tmp_path, third).records[:2] == trial.records
    assert third.seeds == [2]


def test_only_the_result_is_kept(tmp_path):
    run(tmp_path, Measuring())
    run(tmp_path / "other", Measuring(fails_at=1))
    (path,) = tmp_path.glob("*.*")
    assert path.name == "a" * 64 + ".json"
    assert [each.seed for each in Runs.from_file(path, "make it again").records] == [0, 1, 2]
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("kind", ["timeout", "crash", "memory"])
def test_failure_is_data_and_ends_the_trial(tmp_path, kind):
    measure = Measuring(fails_at=1, kind=kind)
    trial = run(tmp_path, measure)
    assert (trial.outcome, trial.detail) == (kind, "rank 1: no more memory")
    assert (trial.records, measure.seeds) == ([], [0, 1])
    # a crash and want of memory may be of that moment alone
    assert run(tmp_path, Measuring()).outcome == ("timeout" if kind == "timeout" else "ok")


def test_timeout_is_cached_until_the_limit_is_raised(tmp_path):
    run(tmp_path, Measuring(fails_at=0, kind="timeout"), limit_s=300.0)
    for limit in (300.0, 200.0):
        measure = Measuring()
        assert run(tmp_path, measure, limit_s=limit).outcome == "timeout"
        assert measure.seeds == []
    assert run(tmp_path, Measuring(), limit_s=301.0).outcome == "ok"


def test_no_time_left_for_the_next_seed_is_a_timeout(tmp_path):
    measure = Measuring()
    trial = run(tmp_path, measure, limit_s=0.0)
    assert (trial.outcome, measure.seeds) == ("timeout", [])
    assert "before seed 0" in trial.detail


def test_working_folder_of_a_killed_trial_is_removed(tmp_path):
    remains = tmp_path / ("a" * 64 + ".work") / "seed0"
    remains.mkdir(parents=True)
    (remains / "half a trace").write_text("x")
    assert run(tmp_path, Measuring()).outcome == "ok"


def test_unexpected_error_is_raised_and_not_stored(tmp_path):
    def broken(seed, folder, left_s):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(tmp_path, broken)
    assert list(tmp_path.iterdir()) == []


def test_damaged_store_is_named(tmp_path):
    (tmp_path / ("a" * 64 + ".json")).write_text('{"outcome": "ok", "recor')
    with pytest.raises(UserError, match=r"json: damaged.*delete it"):
        run(tmp_path, Measuring())


def test_key_changes_with_everything_that_a_result_depends_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    train, model = Train(), Model(preset="tiny")

    def key(strategy=STRATEGY, train=train, model=model, seeds=(0, 1)):
        return trial_key(strategy, train, model, list(seeds), manifest)

    keys = [
        key(),
        key(strategy=parse_strategy({"engine": "ddp"})),
        key(train=Train(steps=7, untimed_steps=1)),
        key(model=Model(preset="small")),
        key(seeds=(0, 2)),
    ]
    assert key() == keys[0]
    assert key(strategy=STRATEGY.canonical()) == keys[0]
    (tmp_path / "user_codecs").mkdir()
    weights = tmp_path / "base/model.safetensors"
    weights.parent.mkdir()
    for path in (tmp_path / "user_codecs/ternary.py", weights):
        for text in ("one", "another"):
            path.write_text(text)
            keys.append(key(model=Model(pretrained="base")))
    manifest.write_text('{"tokens": 1}')
    assert len({*keys, key()}) == len(keys) + 1


def test_code_digest_covers_modules_and_kernels_alone(tmp_path):
    library, kernels = tmp_path / "shardlab", tmp_path / "csrc"
    for folder in (library / "train", library / "report", kernels):
        folder.mkdir(parents=True)
    (library / "train/loop.py").write_text("a = 1\n")
    digests = [code_digest(library)]
    for path in (library / "train/loop.py", library / "train/new.py", kernels / "int8.cpp"):
        path.write_text("a = 2\n")
        digests.append(code_digest(library))
    assert len(set(digests)) == 4
    (library / "report/page.py").write_text("b = 1\n")
    (kernels / "kernels.so").write_bytes(b"built")
    assert code_digest(library) == digests[-1]
