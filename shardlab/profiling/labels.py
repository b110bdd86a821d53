"""Labels in traces: the pass of a step, and the unit whose values move."""

import re

FORWARD, BACKWARD = "shardlab::forward", "shardlab::backward"
"""Labels around the two passes of a micro-batch."""
COMMUNICATION = "shardlab::comm "
"""Label, followed by the name of a unit, around the calls that move its values."""
LINK = "shardlab::link"
"""Label of the time by which an emulated link is slower than the real link."""
ROOT = "root"
"""Unit of values that belong to no other unit."""

# labels of FSDP2's own calls (torch 2.13, _fully_shard/_fsdp_param_group.py), which do not name the
# root
_FSDP2 = re.compile(
    r"FSDP::(?:all_gather|all_gather_copy_out|post_backward_reduce)"
    r"(?: \((.*?)\))?(?: \[pg=\d+\])?"
)


def unit_of(label: str) -> str | None:
    """Return the unit with the communication in a labelled range; None if no unit is named."""
    if label.startswith(COMMUNICATION):
        return label.removeprefix(COMMUNICATION)
    match = _FSDP2.fullmatch(label)
    return None if match is None else match[1] or ROOT
