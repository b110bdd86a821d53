"""Training runs of a trial, and the store that keeps a strategy from being trained twice.

The store is a folder of `<key>.json`. The key covers all that a result depends on: the strategy's
hash, the training parameters, the model and its files, the seeds, the tokens, and the code, with
that of users' codecs. What is kept:

- a trial that ended well, or diverged: for ever;
- a timeout: a hit for this limit and every shorter one; a longer limit measures again;
- a crash or a lack of memory: not at all, since the machine's state may have been the cause. The
  history remembers it, so no later round tries that strategy again.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from shardlab.config.codec_modules import FOLDER
from shardlab.config.model_and_data import Model
from shardlab.config.run_record import Record
from shardlab.config.schema import Train
from shardlab.config.strategy import Strategy
from shardlab.core.document import Document
from shardlab.core.files import sha256_of_file, sha256_of_value, writing
from shardlab.core.progress import stopwatch
from shardlab.search.rounds import Outcome

_NOT_RUN = ("agent", "forecast", "report")
"""packages of the library that no trial runs; all others count, so that none is forgotten"""
_LONGEST_DETAIL = 4000


class Runs(Document):
    """Training runs of one strategy, as the store keeps them."""

    outcome: Outcome
    detail: str = ""
    """text of the error"""
    hash: str
    key: str
    """of `trial_key`"""
    limit_s: float
    records: list[Record] = []
    """one per seed, up to the one that left no hope; empty unless the outcome is ok"""


class TrialFailed(Exception):
    """A measurement that ended without figures; becomes data of the trial."""

    def __init__(
        self, kind: Literal["timeout", "crash", "memory", "diverged"], detail: str
    ) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


Measure = Callable[[int, Path, float], Record]
"""measures one seed: (seed, folder for its files, seconds left); may raise TrialFailed"""

Hopeless = Callable[[Sequence[Record]], bool]
"""whether other seeds cannot change what these records say"""


def run_trial(
    strategy: Strategy,
    key: str,
    seeds: list[int],
    limit_s: float,
    store: Path,
    measure: Measure,
    hopeless: Hopeless,
) -> Runs:
    """Return the training runs of a strategy: from the store, or measured seed by seed.

    Args:
        key: of `trial_key`.
        limit_s: seconds for all seeds together.
        store: folder; made when absent.
        measure: called for each seed until one fails, or those so far are hopeless.

    Raises:
        UserError: a damaged file in the store.
    """
    path = store / f"{key}.json"
    kept = _kept(path, limit_s)
    # with another tolerance or start there may be hope
    if kept is not None and (len(kept.records) in (0, len(seeds)) or hopeless(kept.records)):
        return kept
    work = store / f"{key}.work"
    shutil.rmtree(work, ignore_errors=True)  # a killed trial leaves its folder behind
    try:
        done = kept.records if kept else []
        trial = _measure_all(strategy, key, seeds, done, limit_s, work, measure, hopeless)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if trial.outcome in ("ok", "timeout", "diverged"):
        trial.to_file(path)
    return trial


def trial_key(
    strategy: Strategy, train: Train, model: Model, seeds: list[int], tokens: Path
) -> str:
    """Hash everything that a trial's figures depend on.

    Args:
        tokens: the manifest of the token shards, which holds their checksums.
    """
    return sha256_of_value(
        {
            "strategy": strategy.hash(),
            "train": train.meaning(),
            "model": model.model_dump(mode="json"),
            "model_files": model.state(),
            "seeds": seeds,
            "tokens": sha256_of_file(tokens),
            "code": code_digest(Path(__file__).parents[1]),
            "codecs": _digest(Path().glob(f"{FOLDER}/**/*.py"), Path()),
        }
    )


def code_digest(library: Path) -> str:
    """Hash the code that a trial runs: modules of the library and sources of the kernels.

    Args:
        library: the folder of the package `shardlab`.
    """
    files = [
        file for file in library.rglob("*.py") if file.relative_to(library).parts[0] not in _NOT_RUN
    ]
    kernels = library.parent / "csrc"
    sources = ("*.cpp", "*.h", "CMakeLists.txt")
    files += [file for pattern in sources for file in kernels.rglob(pattern)]
    return _digest(files, library.parent)


def _digest(files: Iterable[Path], root: Path) -> str:
    return sha256_of_value({str(file.relative_to(root)): sha256_of_file(file) for file in files})


def _kept(path: Path, limit_s: float) -> Runs | None:
    if not path.exists():
        return None
    trial = Runs.from_file(path, "delete it")
    if trial.outcome == "timeout" and trial.limit_s < limit_s:
        return None
    return trial


def _measure_all(
    strategy: Strategy,
    key: str,
    seeds: list[int],
    done: list[Record],
    limit_s: float,
    work: Path,
    measure: Measure,
    hopeless: Hopeless,
) -> Runs:
    elapsed = stopwatch()
    outcome: Outcome = "ok"
    detail = ""
    records = [*done]
    try:
        for seed in seeds[len(done) :]:
            left = limit_s - elapsed()
            if left <= 0:
                raise TrialFailed("timeout", f"{limit_s:g} s were over before seed {seed}")
            folder = work / f"seed{seed}"
            with writing(folder):
                folder.mkdir(parents=True)
            records.append(measure(seed, folder, left))
            if hopeless(records):
                break
    except TrialFailed as failure:
        outcome, detail, records = failure.kind, failure.detail[-_LONGEST_DETAIL:], []
    return Runs(
        outcome=outcome,
        detail=detail,
        hash=strategy.hash(),
        key=key,
        limit_s=limit_s,
        records=records,
    )
