"""Capture of one rank's trace of a few training steps, by torch.profiler."""

import gzip
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardlab.core.errors import StorageError
from shardlab.core.files import temporary
from shardlab.core.torch_private import ProfilerConfig

_WARM_UP_STEPS = 1


class Capture:
    """Trace of training steps, with one `ProfilerStep#N` annotation around each.

        with Capture(steps=3) as capture:
            for _ in range(capture.calls):
                train_one_step()
                capture.step()
        capture.export("trace.json.gz")

    The first step warms the profiler up and is dropped. All ranks must capture the same steps.
    """

    def __init__(self, steps: int) -> None:
        # the tracing library prints its stages on stderr, over the rank's own output
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.calls = _WARM_UP_STEPS + steps
        """Number of steps to run inside the block, each followed by `step()`."""
        self._done = 0
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARM_UP_STEPS, active=steps, repeat=1),
            # overlapped communication runs in separate threads
            experimental_config=ProfilerConfig(profile_all_threads=True),
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def step(self) -> None:
        """End a step; the next one begins at once."""
        # without CUDA in use, `synchronize` would allocate memory on the first GPU
        if torch.cuda.is_initialized():
            # queued kernels belong to the step that launched them
            torch.cuda.synchronize()
        self._done += 1
        self._profile.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, traceback)
        if error is None and self._done != self.calls:
            raise RuntimeError(f"step() was called {self._done} times, not {self.calls}")

    def export(self, path: str | Path) -> None:
        """Write the trace as Chrome JSON; compressed when the name ends in `.gz`.

        Raises:
            StorageError: TMPDIR has no space for the uncompressed trace.
        """
        if Path(path).suffix != ".gz":
            self._profile.export_chrome_trace(str(path))
            return
        # torch compresses line by line at the highest level: 0.2 s where this takes 0.02 s
        with temporary("shardlab-trace") as folder:
            plain = folder / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            if not plain.is_file():  # without space torch writes no file, and raises no error
                raise StorageError(
                    f"{folder.parent}: cannot hold the trace of {self.calls} steps: free space, or "
                    "set TMPDIR to a folder of another disk, and run it again"
                )
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
