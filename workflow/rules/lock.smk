import os
import sys

from shardlab.core.errors import UserError
from shardlab.core.lock import lock_tree
from shardlab.core.process import on_end_signals, terminate_children

JOBS_RUN_HERE = workflow.local_exec and not workflow.deployment_settings.deployment_method
if JOBS_RUN_HERE:
    # the `python` of jobs is that of this environment, also where it is not activated
    os.environ.update(PATH=os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()]))


def stop(number):
    """End the jobs too: Snakemake's own handler of SIGTERM would wait for them."""
    terminate_children()
    raise KeyboardInterrupt


# only where jobs will run: who plans, draws or reports may do so beside others
onstart:
    try:
        lock_tree(with_dvc=True)
    except UserError as error:
        print(f"snakemake: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    on_end_signals(stop)
    show_announcement()
    if JOBS_RUN_HERE:
        # Under its default limit Snakemake looks at all ready jobs again a second after it did, so
        # every job that ends adds another such look per second for the rest of the run.
        workflow.scheduler.job_rate_limiter = None
