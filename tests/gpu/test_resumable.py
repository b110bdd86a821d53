"""Results of the suite are kept for the code and the GPUs that they are of."""

from types import SimpleNamespace

import pytest

from tests.gpu import resumable
from tests.gpu.resumable import Results


def report(test: str, when: str, outcome: str) -> SimpleNamespace:
    passed, skipped = outcome == "passed", outcome == "skipped"
    return SimpleNamespace(
        nodeid=test,
        when=when,
        outcome=outcome,
        passed=passed,
        skipped=skipped,
        duration=1.0,
        longrepr=None,
    )


def skipped(results: Results) -> list[str]:
    """Names of the tests that are not run again."""
    found: list[str] = []
    items = [
        SimpleNamespace(nodeid=test, add_marker=lambda mark, test=test: found.append(test))
        for test in ("passes", "fails", "errs", "absent")
    ]
    results.pytest_collection_modifyitems(items)
    return found


def test_only_what_has_passed_is_not_run_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"code": "a", "gpus": "H200"}
    monkeypatch.setattr(resumable, "code_and_gpus", lambda *_: on)
    results = Results(tmp_path / "results")
    assert skipped(results) == []
    for test, when, outcome in (
        ("passes", "setup", "passed"),
        ("passes", "call", "passed"),
        ("fails", "call", "failed"),
        ("errs", "setup", "failed"),
        ("absent", "setup", "skipped"),
    ):
        results.pytest_runtest_logreport(report(test, when, outcome))
    assert skipped(Results(tmp_path / "results")) == ["passes"]
    monkeypatch.setattr(resumable, "code_and_gpus", lambda *_: {**on, "gpus": "H100"})
    assert skipped(Results(tmp_path / "results")) == []
