"""Comparison of the parameters, code and tokens of all ranks, before they train."""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from shardlab.comm.object_collectives import gather_values
from shardlab.core.document import flat
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, sha256_of_value
from shardlab.data.tokens import MANIFEST, TokenSplit, open_split
from shardlab.kernels import native
from shardlab.strategy.codec_table import FOLDER
from shardlab.train.plans import RunPlan, TimingPlan

_OF_A_NODE = {"data", "train.placement"}
"""values of a plan that may differ between nodes"""


def refuse_differences(plan: RunPlan | TimingPlan, group: dist.ProcessGroup) -> None:
    """Check that all ranks have the same plan, code and tokens; they would train all the same.

    Raises:
        UserError: on all ranks, in one line: what differs first, and on which rank.
    """
    facts = _facts(plan)
    if len({*gather_values(sha256_of_value(facts), group)}) == 1:
        return
    first, *others = gather_values(facts, group)
    for rank, other in enumerate(others, 1):
        differ = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differ:
            key, more = differ[0], f" ({len(differ) - 1} more differ)" if len(differ) > 1 else ""
            raise UserError(
                f"ranks differ: {key} is {json.dumps(first.get(key))} on rank 0 and "
                f"{json.dumps(other.get(key))} on rank {rank}{more}: start all ranks with the same "
                "parameters, code and tokens"
            )


def open_training_tokens(data: Path) -> TokenSplit:
    """Open the tokens to train on; the ranks of each node verify all of its files together.

    Raises:
        UserError: a file is missing or damaged.
    """
    share = slice(int(os.environ["LOCAL_RANK"]), None, int(os.environ["LOCAL_WORLD_SIZE"]))
    return open_split(data / "tokens", "train", share)


def _facts(plan: RunPlan | TimingPlan) -> dict[str, Any]:
    """Return what must be equal on all ranks, as JSON values by name; of files their SHA-256."""
    values = flat(TypeAdapter(type(plan)).dump_python(plan, mode="json"))
    package, manifest = Path(__file__).parents[1], plan.data / "tokens" / MANIFEST
    code = {
        str(Path(folder.name, path.relative_to(folder))): sha256_of_file(path)
        for folder in (package, Path(FOLDER))
        for path in sorted(folder.rglob("*.py"))
    }
    return {
        **{key: value for key, value in values.items() if key not in _OF_A_NODE},
        **code,
        "csrc": native.source_hash(),
        f"data/tokens/{MANIFEST}": sha256_of_file(manifest) if manifest.is_file() else None,
    }
