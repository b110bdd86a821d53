import shutil
import subprocess
import sys

from shardlab.core.errors import UserError
from shardlab.core.lock import lock_tree
from shardlab.core.process import on_end_signals, terminate_children

JOBS_RUN_HERE = workflow.local_exec and not workflow.deployment_settings.deployment_method


def check_python():
    """Refuse a `python` for jobs that lacks the library's packages: the environment is not activated."""
    python = shutil.which("python")
    libraries = "import sys; from importlib.util import find_spec as find; "
    libraries += "sys.exit(not (find('pydantic') and find('torch')))"
    if python is None or subprocess.run([python, "-c", libraries]).returncode:
        raise UserError(
            f"{python or 'python'}, which jobs call, is absent or lacks packages of shardlab: activate "
            f"the environment of {sys.executable} (source .venv/bin/activate), or call make run"
        )


def stop(number):
    """End the jobs too: Snakemake's own handler of SIGTERM would wait for them."""
    terminate_children()
    raise KeyboardInterrupt


# only where jobs will run: who plans, draws or reports may do so beside others
onstart:
    try:
        check_partition()
        if JOBS_RUN_HERE:
            check_python()
        lock_tree(with_dvc=True)
    except UserError as error:
        print(f"snakemake: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    on_end_signals(stop)
    if JOBS_RUN_HERE:
        # Under its default limit Snakemake looks at all ready jobs again a second after it did, so
        # every job that ends adds another such look per second for the rest of the run.
        workflow.scheduler.job_rate_limiter = None
