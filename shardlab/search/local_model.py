"""A language model on this machine, in a child process that a deadline can end."""

import json
import os
import select
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.search.chat import Chat
from shardlab.search.prompt import Prompt


class LocalModel(Chat):
    """Model of a Hugging Face folder or a GGUF file, by `shardlab.search.generate`.

    The child process starts with the first prompt and ends with this object.

    Args:
        model: path.
        timeout_s: longest duration of one answer; the first one includes loading the model.
    """

    def __init__(self, model: str, timeout_s: float = 600) -> None:
        self.name = f"local: {model}"
        self.model = model
        self._path = Path(model)
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, prompt: Prompt) -> str:  # noqa: D102
        deadline = time.monotonic() + self._timeout_s
        if self._child is None:
            self._refuse()
            self._child = self._start()
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and said why
            self._child.stdin.write(json.dumps(prompt.messages).encode() + b"\n")
        try:
            reply = json.loads(self._line(self._child, deadline))
        except UserError:
            self._child = None  # the next prompt starts another one
            raise
        if "error" in reply:
            raise self._failure(reply["error"])
        return str(reply["answer"])

    def _refuse(self) -> None:
        """Refuse what can be no model before a process imports torch to find that out."""
        if self._path.is_file():
            if self._path.suffix != ".gguf":
                raise self._failure("neither a folder nor a .gguf file")
        elif not self._path.is_dir():
            raise self._failure("no such folder or file")
        elif not (self._path / "config.json").is_file():
            raise self._failure("no config.json in it")
        elif not any(self._path.glob("*.safetensors")):
            raise self._failure("no safetensors file in it, and nothing is unpickled: convert it")

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "shardlab.search.generate",
                self._path,
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of libraries; errors come as answers
            bufsize=0,
            pipesize=1 << 20,  # more than any prompt, so that writing one never waits
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        weakref.finalize(self, _end, child)
        return child

    def _line(self, child: subprocess.Popen[bytes], deadline: float) -> bytes:
        """Return the next line that the child writes; it is killed at the deadline."""
        assert child.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([child.stdout], [], [], left)[0]:
                _end(child)
                raise self._failure(f"none within {self._timeout_s:g} s")
            part = child.stdout.read(1 << 16)
            if not part:
                raise self._failure(f"its process ended with exit code {child.wait()}")
            line += part
        return line

    def _failure(self, trouble: str) -> UserError:
        return UserError(
            f"agent.model: {self.model}: {trouble}: give a model that answers, or set agent.judge "
            "to rules"
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    with child:
        child.kill()
