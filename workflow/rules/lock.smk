import sys

from shardlab.core.errors import UserError
from shardlab.core.lock import lock_tree
from shardlab.core.process import on_end_signals, terminate_children


def stop(number):
    """End the jobs too: Snakemake's own handler of SIGTERM would wait for them."""
    terminate_children()
    raise KeyboardInterrupt


# only where jobs will run: who plans, draws or reports may do so beside others
onstart:
    try:
        check_partition()
        check_python()
        lock_tree()
    except UserError as error:
        print(f"snakemake: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    on_end_signals(stop)
    start_forks()
    lift_rate_limit()
