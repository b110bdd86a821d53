import os
import sys
from types import ModuleType

from shardlab.data.workers import worker_pool


def test_workers_do_not_run_the_main_module(tmp_path, monkeypatch):
    """That of a training run would import torch in each of them."""
    script = tmp_path / "main.py"
    script.write_text("raise ImportError('imported')\n")
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = str(script), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    with worker_pool(1) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
    assert sys.modules["__main__"] is main
