import shutil
import subprocess
import sys
import uuid

from stages import forks


def start_forks():
    """Start the server of which stages are forks, where jobs run with this Python on this machine."""
    python = shutil.which("python")
    if (
        workflow.local_exec
        and not workflow.deployment_settings.deployment_method
        and python is not None
        and Path(python).absolute().parent == Path(sys.executable).parent
    ):
        name = f"shardlab-{uuid.uuid4()}"
        server = (sys.executable, "-m", "stages.forks", name, str(os.getpid()))
        subprocess.Popen(server, stdin=subprocess.DEVNULL)
        os.environ[forks.VARIABLE] = name
