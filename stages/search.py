"""Search for the fastest sharding strategy of a tolerated perplexity, without the pipeline.

The search works in searches/NAME with the stages of the pipeline, and goes on from there when it is
called again.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from shardlab.comm.emulated_link import Links
from shardlab.config.fields import Name
from shardlab.config.link import LOOPBACK, Link
from shardlab.config.parameters import Parameters
from shardlab.config.run_record import read_records
from shardlab.config.search import Agent
from shardlab.config.timing_record import read_all
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file
from shardlab.core.progress import say
from shardlab.data.tokenize import recipe_sha256
from shardlab.data.tokens import read_manifest
from shardlab.search.beginning import initial_history
from shardlab.search.folder import SearchFolder, Step, TimeIsUpError, run_stage
from shardlab.search.history import History
from shardlab.search.parameters import Request, search_parameters
from shardlab.search.ranking import ranking, ranking_text
from shardlab.search.rounds import Proposal
from shardlab.search.written import written
from stages import (
    calibrate,
    collect,
    decide,
    estimate,
    prepare,
    profile,
    propose,
    timing,
    tokenize,
    train,
    trial,
)
from stages import validate as validation
from stages.common import run

_DATA, _SEARCHES = Path("data"), Path("searches")
_TRAINING = ("train", "profile", "validate")
# an emulated link has its addresses in a network of 254
Ranks = Annotated[int, Field(ge=2, le=254)]
Minutes = Annotated[int, Field(ge=1, le=10_000)]


def main(
    params: Parameters,
    *,
    link: Annotated[str, "rate between ranks, such as 100mbit; none: loopback"],
    ranks: Annotated[int, "processes on this machine"],
    minutes: Annotated[int, "time of the search in total, earlier calls included"] = 10,
    model: Annotated[str | None, "preset, or folder with a config.json; else as in params"] = None,
    name: Annotated[str | None, "folder in searches/; else from link and ranks"] = None,
) -> None:
    """Search, and print the strategies that were raced and the best of them."""
    request = Request(
        None if link == "none" else validate(Link, {"rate": link}, "--link"),
        validate(Ranks, ranks, "--ranks"),
        model,
    )
    limit_s = 60.0 * validate(Minutes, minutes, "--minutes")
    if name is None:
        name = f"{link if request.link else LOOPBACK}-{ranks}-ranks".replace(".", "-")
    path = _SEARCHES / validate(Name, name, "--name")
    folder = SearchFolder(path, search_parameters(params, request), limit_s)
    if request.link is not None:
        with Links(ranks, request.link):
            pass  # this process may make them
    _ensure_data(params)
    folder.begin(_DATA)
    found, reason = _search(folder, minutes)
    show(folder, found, reason)


def _ensure_data(params: Parameters) -> None:
    """Prepare and tokenize the data of the tree where they are absent."""
    data, model, options = params("data", "model", "tokenize")
    options = options.for_model(model)
    corpus = _DATA / "corpus.json"
    for stage, output in ((prepare, "source.json"), (tokenize, "statistics.json")):
        if not (_DATA / output).exists():
            name = stage.__name__.rpartition(".")[2]
            run_stage(name, partial(stage.main, params), Path())
    recipe = recipe_sha256(sha256_of_file(corpus), data.validation_share, options)
    if read_manifest(_DATA / "tokens").recipe_sha256 != recipe:
        raise UserError("data/tokens: of other parameters: run python -m stages.tokenize")


def _search(folder: SearchFolder, minutes: int) -> tuple[History, str]:
    """Return the history after as many rounds as the minutes allow, and why there are no more."""
    params = folder.parameters()
    try:
        for step in _preparation(params):
            folder.run(step)
    except TimeIsUpError:
        raise UserError(
            f"{minutes} minutes are over, and nothing was raced yet: repeat it with more "
            "--minutes: what was measured is kept"
        ) from None
    agent, train_, timings = params("agent", "train", "timings")
    timed = read_all(folder.path / "results/timings", timings)
    records = read_records(folder.path / "results/results.jsonl")
    history = initial_history(records, timed, agent, train_)
    for number in params("rounds"):
        try:
            _round(folder, number, agent, [*timings][-1])
        except TimeIsUpError:
            return history, f"the rest of {minutes} minutes is too short for another round"
        path = folder.path / f"results/rounds/{number}/history.json"
        history = History.from_file(path, f"remove {path}")
        if history.rounds[-1].decision == "none":
            break
    return history, history.rounds[-1].reason


def _preparation(params: Parameters) -> list[Step]:
    """Return what the first round needs."""
    timings, runs, seeds = params("timings", "strategies", "seeds")
    # the forecast is fitted on transfers without a link: those with one only validate it
    unlinked = ('forecast.timings=["loopback"]',)
    steps = [
        Step(calibrate.main, "results/calibration.json", overrides=unlinked),
        *(Step(timing.main, f"results/timings/{name}.jsonl", (name,)) for name in timings),
        Step(estimate.main, "results/memory.json"),
    ]
    for name, seed in product(runs, seeds):
        options = {"run": name, "seed": seed}
        steps.append(
            Step(train.main, f"results/train/{name}/seed{seed}/metrics.json", options=options)
        )
    for name in runs:
        last = f"{name}/seed{seeds[-1]}"
        steps += [
            Step(profile.main, f"results/profile/{last}.json", (name,)),
            Step(validation.main, f"results/validate/{last}.json", (name,)),
        ]
    return [*steps, Step(collect.main, "results/results.jsonl")]


def _round(folder: SearchFolder, number: str, agent: Agent, timing_name: str) -> None:
    """Run a round, if time is left for its race, and to train what has other codecs.

    Args:
        timing_name: timing on the link of the search: a race does at least as much.

    Raises:
        TimeIsUpError: there is too little.
    """
    results = f"results/rounds/{number}"
    folder.run(Step(propose.main, f"{results}/proposal.json", (number,)))
    proposal = Proposal.from_file(folder.path / results / "proposal.json", "remove it")
    trained = all(arm.trained for arm in proposal.arms)
    training_s = (
        0.0 if trained else folder.seconds(*(f"{stage} {agent.start}" for stage in _TRAINING))
    )
    # an attempt of a race has half of its limit, and a look ends it before the end of that
    needed_s = max(training_s, 4 * folder.seconds(f"timing {timing_name}"))
    left_s = folder.left_s - training_s
    # a slow link or a large model needs more than the default
    limit_s = min(left_s, max(agent.trial_timeout_s, needed_s))
    within = (f"agent.trial_timeout_s={max(limit_s, 1):.0f}",)
    race = Step(trial.main, f"{results}/trial.json", (number,), overrides=within)
    if proposal.arms and left_s < needed_s and not folder.has(race):
        raise TimeIsUpError
    folder.run(race)
    folder.run(Step(decide.main, f"{results}/history.json", (number,)))


def show(folder: SearchFolder, history: History, reason: str) -> None:
    """Print the ranking and the strategy that is held."""
    timed = read_all(folder.path / "results/timings", folder.parameters()("timings"))
    load, held = history.workload, history.held
    print(f"{load.model}, {load.world_size} ranks, link {load.link}: {len(history.races)} races")
    print(f"ended: {reason}\n")
    print(ranking_text(ranking(history, timed)))
    print("\nSteps (95 % interval) and perplexities are over those of the start; predicted: ms.")
    why = "the fastest that was shown to be so, at a tolerated perplexity"
    if history.rounds and not history.rounds[-1].fits:
        why = "the start: nothing was found within the memory limit"
    print(f"* held: {why}\n")
    entry = {"strategies": {folder.path.name: written(held.strategy)}}
    print("# for params.yaml")
    print(yaml.safe_dump(entry, sort_keys=False), end="", flush=True)
    say(f"search: {folder.seconds() / 60:.1f} minutes; everything is kept in {folder.path}")


if __name__ == "__main__":
    run(main)
