"""The labels that traces carry: which pass of a step runs, and which unit's values move."""

import re

FORWARD, BACKWARD = "shardlab::forward", "shardlab::backward"
"""around the two passes of a micro-batch"""
COMMUNICATION = "shardlab::comm "
"""with the name of a unit: around the calls that move its values"""
LINK = "shardlab::link"
"""the time that an emulated link takes longer than the real one"""
ROOT = "root"
"""the unit of what belongs to no other one"""

# what FSDP2 puts around its own calls (torch 2.13, _fully_shard/_fsdp_param_group.py); the root
# has no name there
_FSDP2 = re.compile(
    r"FSDP::(?:all_gather|all_gather_copy_out|post_backward_reduce)"
    r"(?: \((.*?)\))?(?: \[pg=\d+\])?"
)


def unit_of(label: str) -> str | None:
    """The unit whose communication a range with this label holds; None if it says none."""
    if label.startswith(COMMUNICATION):
        return label.removeprefix(COMMUNICATION)
    match = _FSDP2.fullmatch(label)
    return None if match is None else match[1] or ROOT
