"""Estimate the memory of every run before it, in closed form, and print it by category.

Without tokens the vocabulary is that of the parameters, and nothing is written.
"""

from pathlib import Path

import pandas as pd
import torch

from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.core.lock import is_job
from shardlab.core.progress import say
from shardlab.data.settings import Tokenize
from shardlab.data.tokens import MANIFEST, read_manifest
from shardlab.models.build import build_model
from shardlab.models.memory import Categories, closed_form, host_memory
from shardlab.models.settings import Model
from shardlab.models.shapes import vocabulary_of
from shardlab.models.sizes import sizes_of
from shardlab.results.train_result import MemoryEstimate
from shardlab.strategy.document import Strategy
from shardlab.train.settings import Train
from shardlab.train.step_space import free_bytes
from stages.common import SAMPLES, refuse_other_tokens
from stages.sections import Sections

_CPU = torch.device("cpu")
_SUMS = ["device", "host", "fits"]
"""columns after those of the categories"""


def main(params: Sections) -> None:
    """Write results/memory.json, and print a row for each run."""
    model, strategies = params("model", Model), params("strategies", dict[str, Strategy])
    train = params("train", Train, *SAMPLES, "world_size", "clip", "optimizer")
    folder, ranks = Path("data/tokens"), train.world_size
    step = train.step_size(ranks)
    has_tokens = (folder / MANIFEST).is_file()
    if has_tokens:
        refuse_other_tokens(params)
        tokens = read_manifest(folder)
        vocabulary, end_of_text = tokens.vocabulary, tokens.end_of_text
    else:
        vocabulary, end_of_text = _vocabulary(model, params("tokenize", Tokenize)), 0
    module = build_model(model, vocabulary, train.sequence_length, end_of_text, seed=0).module
    estimates, rows = {}, {}
    for name, strategy in strategies.items():
        case = strategy, sizes_of(module, strategy, step, _CPU), ranks
        device, host = closed_form(*case), host_memory(*case)
        # the device is the CPU, so host memory counts
        estimates[name] = MemoryEstimate(bytes_by_category={**device, **host}).model_dump()
        rows[name] = _row(device, host, ranks)
    if not is_job():
        table = pd.DataFrame.from_dict(rows, orient="index").fillna("-")
        print(table[[*table.columns.difference(_SUMS, sort=False), *_SUMS]].to_string())
        say("estimate: MB of a rank at the peak of a step, in the memory of device and host")
    if has_tokens:
        write_json("results/memory.json", estimates)
        say(f"estimate: memory of {len(strategies)} runs in results/memory.json")
    else:
        say("estimate: there are no tokens yet: nothing is written")


def _vocabulary(model: Model, options: Tokenize) -> int:
    """Return the size of the vocabulary by the parameters alone.

    Raises:
        UserError: a tokenizer's file says it.
    """
    if model.shape is None:
        return 1  # the configuration says how many rows there are
    size = vocabulary_of(options)
    if size is None:
        raise UserError("the vocabulary is in the tokenizer: run shardlab tokenize first")
    return size


def _row(device: Categories, host: Categories, ranks: int) -> dict[str, str]:
    """Return the cells of a run: the categories of the device, both sums, and whether they fit the
    memory that is free on this machine."""
    needed, beside = sum(device.values()), sum(host.values())
    free = free_bytes(_CPU, ranks)
    on_device = free - beside
    if torch.cuda.is_available():
        on_device = free_bytes(torch.device("cuda"), ranks)
    cells = device | {"device": needed, "host": beside}
    fits = "yes" if needed <= on_device and beside <= free else "no"
    return {name: f"{size / 1e6:,.1f}" for name, size in cells.items()} | {"fits": fits}
