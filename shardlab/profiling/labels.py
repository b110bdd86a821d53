"""Labels in traces: the pass of a step, and the unit whose values move."""

import re

FORWARD, BACKWARD = "shardlab::forward", "shardlab::backward"
"""around the two passes of a micro-batch"""
COMMUNICATION = "shardlab::comm "
"""followed by the name of a unit: around the calls that move its values"""
LINK = "shardlab::link"
"""the time by which an emulated link is slower than the real one"""
ROOT = "root"
"""unit of values that belong to no other one"""

# labels of FSDP2's own calls (torch 2.13, _fully_shard/_fsdp_param_group.py); the root has no name
# in them
_FSDP2 = re.compile(
    r"FSDP::(?:all_gather|all_gather_copy_out|post_backward_reduce)"
    r"(?: \((.*?)\))?(?: \[pg=\d+\])?"
)


def unit_of(label: str) -> str | None:
    """Return the unit whose communication a labelled range contains; None if it names none."""
    if label.startswith(COMMUNICATION):
        return label.removeprefix(COMMUNICATION)
    match = _FSDP2.fullmatch(label)
    return None if match is None else match[1] or ROOT
