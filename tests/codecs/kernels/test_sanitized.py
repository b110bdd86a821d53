import shutil
import subprocess
import sys

import pytest

from tests.codecs.kernels.all_kernels import digest


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_sanitizers_report_nothing():
    command = [sys.executable, "-m", "tests.codecs.kernels.sanitized", "300", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split()[0] == digest()
    assert run.stderr == ""
