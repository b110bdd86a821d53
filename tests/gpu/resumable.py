"""Plugin of pytest that keeps results: `pytest -p tests.gpu.resumable --results FOLDER`.

Each test leaves a JSON file. A test that has passed with the same code on the same GPUs is skipped.
"""

import hashlib
import subprocess
from pathlib import Path

import pytest

from shardlab.core.files import read_json, write_json

_CODE = "shardlab", "csrc", "tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="folder of results")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(config.getoption("results")))


def code_and_gpus() -> dict[str, str]:
    """Return a hash of the code and the GPUs: results of others are outdated.

    The process does not ask CUDA, so that it can fork ranks that do.
    """
    digest = hashlib.sha256()
    for file in sorted(path for name in _CODE for path in Path(name).rglob("*.*")):
        if file.suffix in (".py", ".cpp", ".h", ".yaml"):
            digest.update(file.as_posix().encode() + b"\0" + file.read_bytes())
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        gpus = ""
    return {"code": digest.hexdigest(), "gpus": gpus.strip()}


class Results:
    """Results of tests, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, code_and_gpus()

    def _file(self, test: str) -> Path:
        return self._folder / f"{hashlib.sha256(test.encode()).hexdigest()[:16]}.json"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            file = self._file(item.nodeid)
            known = read_json(file) if file.exists() else {}
            if known.get("outcome") == "passed" and known["on"] == self._key:
                item.add_marker(pytest.mark.skip(reason=f"passed before, see {self._folder}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        found = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        error = str(report.longrepr or "")
        write_json(self._file(report.nodeid), {**found, "error": error, "on": self._key})
