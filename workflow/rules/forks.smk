import shutil
import subprocess
import sys
import uuid

from shardlab.core.errors import UserError
from stages import forks

PYTHON = shutil.which("python")
LIBRARIES = (
    "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ['pydantic', 'torch'])))"
)


def jobs_run_here():
    return workflow.local_exec and not workflow.deployment_settings.deployment_method


def has_this_python():
    return PYTHON is not None and Path(PYTHON).absolute().parent == Path(sys.executable).parent


def check_python():
    """Refuse a `python` for jobs that lacks the library's packages: the environment is not activated."""
    if not jobs_run_here() or has_this_python():
        return
    if PYTHON is None or subprocess.run([PYTHON, "-c", LIBRARIES]).returncode:
        raise UserError(
            f"{PYTHON or 'python'}, which jobs call, is absent or lacks packages of shardlab: activate "
            f"the environment of {sys.executable} (source .venv/bin/activate), or call make run"
        )


def start_forks():
    """Start the server of which stages are forks, where jobs run with this Python on this machine."""
    if jobs_run_here() and has_this_python():
        name = f"shardlab-{uuid.uuid4()}"
        server = (sys.executable, "-m", "stages.forks", name, str(os.getpid()))
        subprocess.Popen(server, stdin=subprocess.DEVNULL)
        os.environ[forks.VARIABLE] = name


def lift_rate_limit():
    """Let local jobs start at any rate.

    Under its default limit Snakemake looks at all ready jobs again a second after it did, so every
    job that ends adds another such look per second for the rest of the run.
    """
    if jobs_run_here():
        workflow.scheduler.job_rate_limiter = None
