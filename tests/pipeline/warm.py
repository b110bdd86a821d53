# ruff: noqa: PTH109, PTH115, PTH120, PTH123 - clients, which read this too, start without pathlib
"""`python`, `dvc` and `snakemake` without the time for their imports.

A server has imported what the tools and stages import, apart from the library itself, of which each
project has its own copy. For every command it forks a process that takes over the arguments,
folder, environment, umask and streams of a client, and the client ends as that process does.

The process is a child of the server, and has another command line: tests of signals, locks and
parents take the real commands. So does the client where anything is unusual that imports may read.
"""

import marshal
import os
import signal
import socket
import struct
import sys

IMPORTS = {
    "dvc": (
        *("dvc.analytics", "dvc.cachemgr", "dvc.cli.parser", "dvc.lock", "dvc.repo.experiments"),
        *("dvc.repo.index", "dvc.repo.plots", "dvc.repo.stage", "dvc.rwlock", "dvc.stage.run"),
        *("dvc.utils.strictyaml", "dvc_data.hashfile.db.local", "scmrepo.git", "zc.lockfile"),
    ),
    "snakemake": (
        *("docutils.core", "pygments.formatters.html", "requests", "smart_open"),
        *("snakemake.cli", "snakemake.profiles", "snakemake.report.html_reporter"),
    ),
    "stages": (
        *("concurrent.futures.process", "multiprocessing.queues", "numpy", "orjson", "yaml"),
        *("pydantic.main", "pydantic.plugin._loader", "pydantic.type_adapter", "pydantic.types"),
        *("annotated_types", "tokenizers.trainers", "tqdm.contrib.logging"),
    ),
    "tables": ("jinja2", "matplotlib.figure", "pandas", "scipy.optimize"),
    "models": (
        *("psutil", "safetensors.torch", "torch.profiler", "torch.distributed.fsdp"),
        *("torch.distributed.checkpoint.hf_storage", "torch.distributed.tensor"),
        *("torch.distributed._tools.fsdp2_mem_tracker", "torch.nn.attention.flex_attention"),
        *("torch.nn.parallel", "torch.testing._internal.distributed.fake_pg", "scipy.optimize"),
        *("transformers.core_model_loading", "transformers.modeling_utils", "xxhash"),
        *("transformers.convert_slow_tokenizer", "transformers.tokenization_utils_tokenizers"),
        *("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
        *("tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.summary_pb2"),
    ),
}
NEEDS = {
    "forecast": ("tables",),
    "report": ("tables",),
    **dict.fromkeys(("calibrate", "estimate", "propose", "timing", "train"), ("models",)),
    **dict.fromkeys(("search", "trial", "validate"), ("models",)),
}
"""of stages, besides those of all"""
OWN = ("DVC_", "MAKE", "PIP_", "PYTEST_", "SHARDLAB_", "SNAKEMAKE_", "TEMP", "TMP")
"""beginnings of variables that a command may have of its own: no import reads them"""
OWN_NAMES = {"_", "MFLAGS", "OLDPWD", "PATH", "PS1", "PWD", "SHELL", "SHLVL"}
"""likewise: an activated environment exports its prompt, which a shell of Snakemake drops"""
_THREADS = "OMP_NUM_THREADS"
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def state(variables: dict[bytes, bytes]) -> object:
    """State that a new process has and a fork would not have otherwise."""
    fixed = {
        key: value
        for key, value in variables.items()
        if (name := key.decode()) not in OWN_NAMES
        and not name.startswith(OWN)
        and not name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS"))
    }
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]
    ignored = [signal.getsignal(number) == signal.SIG_IGN for number in _SIGNALS]
    limits = open("/proc/self/limits").read()  # noqa: SIM115
    processors = sorted(os.sched_getaffinity(0))
    return [sorted(fixed.items()), spaces, ignored, limits, processors, os.nice(0)]


def client(place: str, words: list[str], real: list[str]) -> None:
    """Let the server run the command, or become it where the server cannot."""
    handled = words[0] == "-m" and words[1].startswith("stages.") if words else False
    if not (handled or (words and words[0].endswith((".py", "/dvc", "/snakemake")))):
        os.execv(real[0], [*real, *words])
    umask = os.umask(0)
    os.umask(umask)
    variables = dict(os.environb)
    request = (words, os.getcwd(), umask, variables, state(variables))
    content = marshal.dumps(request)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [struct.pack("q", len(content))], [0, 1, 2])
        connection.sendall(content)
        if connection.recv(1) != b"y":
            os.execv(real[0], [*real, *words])
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        [code] = struct.unpack("i", connection.recv(4) or struct.pack("i", 1))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(place: str) -> None:
    """Answer clients until the parent ends; return in each process that is a command."""
    import contextlib
    import gc
    import importlib
    import selectors

    _die_with_parent()
    own = state(dict(os.environb))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    commands: dict[socket.socket, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                words, folder, umask, variables, theirs, streams = _request(connection)
                if theirs != own:
                    connection.sendall(b"n")
                    connection.close()
                else:
                    for module in _imports(words):
                        importlib.import_module(module)
                    gc.freeze()
                    connection.sendall(b"y")
                    pid = os.fork()
                    if pid == 0:
                        for other in (listener, connection, *commands):
                            other.close()
                        for _, handle in commands.values():
                            os.close(handle)
                        selector.close()
                        _become(words, folder, umask, variables, streams)
                        return
                    commands[connection] = (pid, os.pidfd_open(pid))
                    selector.register(connection, selectors.EVENT_READ)
                    selector.register(commands[connection][1], selectors.EVENT_READ, connection)
                for stream in streams:
                    os.close(stream)
            elif key.data is None:  # a signal, or the end of a client
                connection = key.fileobj
                if connection not in commands:
                    continue
                number = _signal(connection)
                os.kill(commands[connection][0], number)
                if number == signal.SIGKILL:
                    selector.unregister(connection)
            else:  # the end of a command
                connection = key.data
                pid, handle = commands.pop(connection)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                selector.unregister(handle)
                os.close(handle)
                if connection in selector.get_map():
                    selector.unregister(connection)
                    with contextlib.suppress(OSError):  # the client ends at this moment
                        connection.sendall(struct.pack("i", code))
                connection.close()


def _request(connection: socket.socket) -> tuple:
    length, streams, *_ = socket.recv_fds(connection, 8, 3)
    content = b""
    while len(content) < struct.unpack("q", length)[0]:
        content += connection.recv(1 << 20)
    return (*marshal.loads(content), streams)


def _signal(connection: socket.socket) -> int:
    """The signal that a client has received; SIGKILL when it has ended."""
    try:
        return (connection.recv(1) or [signal.SIGKILL])[0]
    except ConnectionError:
        return signal.SIGKILL


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _imports(words: list[str]) -> list[str]:
    names = [word.rpartition("/")[2] for word in words[:2]]
    if words[0] == "-m":
        groups = ("stages", *NEEDS.get(words[1].partition(".")[2], ()))
    else:
        groups = tuple(
            tool for tool in ("dvc", "snakemake") if any(n.startswith(tool) for n in names)
        )
    return [module for group in groups for module in IMPORTS[group]]


def _become(
    words: list[str], folder: str, umask: int, variables: dict[bytes, bytes], streams: list[int]
) -> None:
    import tempfile

    _die_with_parent()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(folder)
    os.umask(umask)
    os.environb.clear()
    os.environb.update(variables)
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and _THREADS in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ[_THREADS]))
    sys.argv = list(words)


def execute() -> None:
    """Run what `sys.argv` names as `python` would, and end this process."""
    import atexit
    import threading
    import traceback

    code: object = 0
    try:
        _run()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:  # whatever the command did not catch
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # without the time to take apart all that was imported
    os._exit(code & 0xFF if isinstance(code, int) else 1)


def _run() -> None:
    import runpy
    from types import ModuleType

    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if sys.argv[0] == "-m":
        module, sys.argv = sys.argv[1], ["-m", *sys.argv[2:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    else:
        path = main.__file__ = sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        with open(path, "rb") as script:
            code = compile(script.read(), path, "exec")
        exec(code, main.__dict__)


if __name__ == "__main__":
    serve(sys.argv[1])
    execute()
