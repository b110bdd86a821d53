"""Search for the fastest sharding strategy of a tolerated perplexity, without an experiment.

The command writes one into searches/NAME and runs its rounds with Snakemake, one after the other,
and goes on from there when it is called again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from shardlab.choose.experiment import result_text, search_parameters
from shardlab.choose.history import History
from shardlab.comm.emulated_link import Links
from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.core.document import validate
from shardlab.core.link import LOOPBACK, Link
from shardlab.core.progress import say, stopwatch
from shardlab.core.types import Name
from stages.folder import make_folder
from stages.run import snakemake

# an emulated link has its addresses in a network of 254
Ranks = Annotated[int, Field(ge=2, le=254)]
Minutes = Annotated[int, Field(ge=1, le=10_000)]
_ROUNDS = 16
"""over which the error of a search is spread: minutes or the stop-loss end it before"""


def main(
    link: str,
    world_size: int,
    minutes: int = 10,
    model: str | None = None,
    name: str | None = None,
    params: str = "params.yaml",
    overrides: Sequence[str] = (),
) -> None:
    """Search, and print the strategies that were raced and the best of them."""
    emulated = None if link == "none" else validate(Link, link, "--link")
    ranks = validate(Ranks, world_size, "--world-size")
    limit_s = 60.0 * validate(Minutes, minutes, "--minutes")
    if name is None:
        name = f"{link if emulated else LOOPBACK}-{ranks}-ranks".replace(".", "-")
    folder = Path("searches") / validate(Name, name, "--name")
    parameters = Parameters(params, overrides)
    sections = {section: parameters(section) for section in Params.model_fields}
    tree = search_parameters(sections, emulated, ranks, _ROUNDS, model)
    if emulated is not None:
        with Links(ranks, emulated):
            pass  # this process may make them
    make_folder(yaml.safe_dump(tree, sort_keys=False), folder, Path())
    history, reason = _search(folder, limit_s)
    print(result_text(history, folder, reason))
    sys.stdout.flush()
    say(f"search: all results are in {folder}")


def _search(folder: Path, limit_s: float) -> tuple[History, str]:
    """Return the history after as many rounds as the time allows, and why there are no more."""
    elapsed = stopwatch()
    for number in range(1, _ROUNDS + 1):
        path = f"results/rounds/{number}/history.json"
        snakemake(folder, path)
        history = History.from_file(folder / path, f"remove {folder / path}")
        if history.rounds[-1].decision == "none":
            break
        if elapsed() >= limit_s:
            return history, f"{limit_s / 60:.0f} minutes are over"
    return history, history.rounds[-1].reason
