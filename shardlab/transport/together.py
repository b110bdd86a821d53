"""What all ranks do together, or fail at together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.transport.gather import gather_values

Value = TypeVar("Value")


def run_or_fail_together(group: dist.ProcessGroup, failed: str, call: Callable[[], Value]) -> Value:
    """What the call returns, when it has ended on all ranks.

    Without it a rank that fails leaves the others waiting in their next collective.

    Args:
        group: of gloo.
        failed: what the error begins with, unless it speaks to the user already.

    Raises:
        UserError: on all ranks, if the call had an error on any: in one line, that of the first.
    """
    values, cause, account = [], None, None
    try:
        values.append(call())
    except UserError as error:
        account = str(error)
    except Exception as error:
        cause, text = error, " ".join(str(error).split())
        account = f"{failed} (rank {dist.get_rank(group)}: {text or type(error).__name__})"
    for told in gather_values(account, group):
        if told is not None:
            values.clear()  # a traceback would keep it
            raise UserError(told) from cause
    return values[0]
