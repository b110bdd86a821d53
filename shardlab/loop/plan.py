"""Plan of one training run, and tokens that rank 0 builds when they are missing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, sha256_of_value
from shardlab.data.tokenize.tokenize import build_tokens, recipe_sha256
from shardlab.data.tokens.tokens import MANIFEST, read_manifest
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Model, Tokenize, Train
from shardlab.strategy.strategy import Strategy

_POLL_S = 0.1


class TokenPlan(NamedTuple):
    """Options that turn the corpus.json of a folder into its tokens."""

    validation_share: float
    options: Tokenize


@dataclass(frozen=True)
class RunPlan:
    """One run: a strategy with one seed."""

    run: str
    seed: int
    strategy: Strategy
    train: Train
    model: Model
    data: Path = Path("data")
    """folder with tokenizer.json, tokens/ and source.json"""
    tokens: TokenPlan | None = None
    """how to build the first two from its corpus.json when they are missing; None: they exist"""

    def params_hash(self) -> str:
        """Return 16 hexadecimal digits of a hash over all parameters that the results depend on."""
        strategy, model = (
            document.model_dump(mode="json") for document in (self.strategy.canonical(), self.model)
        )
        return sha256_of_value([strategy, self.train.meaning(), model])[:16]


def plan_of_missing_tokens(folder: Path, params: Parameters) -> TokenPlan | None:
    """Return how to build the tokens of a folder that has a corpus and none; else None.

    No stage depends on these parameters: both tools make the tokens before they train.
    """
    if (folder / "tokens" / MANIFEST).exists() or not (folder / "corpus.json").exists():
        return None
    data, options = params("data", "tokenize")
    return TokenPlan(data.validation_share, options)


def ensure_tokens(folder: Path, plan: TokenPlan, rank: int, patience_s: float) -> None:
    """Wait until `folder` holds the tokens of its corpus.json; see `build_once`.

    Raises:
        UserError: there is no corpus.json, or it cannot be turned into tokens.
    """
    corpus = folder / "corpus.json"
    if not corpus.is_file():
        raise UserError(f"{corpus}: there is none; make it: python -m stages.prepare")
    recipe = recipe_sha256(sha256_of_file(corpus), *plan)
    build = partial(build_tokens, corpus, *plan, folder / ".work", folder)
    build_once(folder / "tokens", recipe, rank, build, patience_s)


def build_once(
    tokens: Path, recipe: str, rank: int, build: Callable[[], object], patience_s: float
) -> None:
    """Wait on every rank until `tokens` has a manifest of `recipe`.

    To be called by all ranks, on any nodes, with a shared folder. Rank 0 calls `build` when there
    is no such manifest, the others poll for it: a collective could time out.

    Args:
        recipe: expected `Manifest.recipe_sha256`.
        patience_s: longest wait without a sign of life from rank 0; a build may take any time.

    Raises:
        UserError: rank 0 went silent.
    """
    sign = tokens.with_name(f".{tokens.name}-building")
    if rank > 0:
        _wait(tokens, recipe, sign, patience_s)
    elif not _holds(tokens, recipe):
        with _signs_of_life(sign, patience_s / 4):
            build()


def _holds(tokens: Path, recipe: str) -> bool:
    try:
        return read_manifest(tokens).recipe_sha256 == recipe
    except UserError:
        return False


def _wait(tokens: Path, recipe: str, sign: Path, patience_s: float) -> None:
    last, since = b"", time.monotonic()
    while not _holds(tokens, recipe):
        now = _read(sign)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            raise UserError(
                f"{tokens / MANIFEST}: waited {patience_s:g} s without a sign of life from rank 0, "
                "which makes it: see what rank 0 says, and whether all nodes share this folder"
            )
        time.sleep(_POLL_S)


def _read(sign: Path) -> bytes:
    """Return the contents, not the time: clocks of nodes differ, and NFS caches attributes."""
    try:
        return sign.read_bytes()
    except OSError:  # not written yet, or removed
        return b""


@contextmanager
def _signs_of_life(path: Path, every_s: float) -> Iterator[None]:
    """Change the contents of the file periodically, as long as this process lives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(min(every_s, 1.0)):
            path.write_text(str(time.time_ns()))

    thread = threading.Thread(target=write, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)
