"""Cache keys of code: what each stage imports, as digests that both tools compare.

A stage depends on every module of the library that it imports, directly or not, found by grimp.
Python is compared by its syntax tree without docstrings and comments, and settings without their
fields, whose values are keys of their own: data/params.yaml has them in full. What no import shows
is added: the codecs and engines of the strategies that a stage runs, data files of its packages,
the C++ sources behind the kernels, and the machine where a stage measures time.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grimp

from shardlab.config.experiment import Params
from shardlab.core.document import Document
from shardlab.core.host import describe_host, torch_version
from shardlab.results.settings import Timing
from shardlab.results.timing_result import machine_name
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import FOLDER
from shardlab.strategy.document import Strategy
from shardlab.strategy.engine_traits import ENGINES

STAGES = (
    *("prepare", "tokenize", "profile", "validate", "calibrate", "forecast", "estimate"),
    *("collect", "propose", "trial", "decide", "report"),
)
"""stages with one key; `train` has one for each run, `tune` for each method, `timing` for each
timing"""
_COMPARED_BY_VALUE = ("shardlab.cli", "shardlab.config", "shardlab.core.types")
"""these hand over arguments and parameters, which are keys, and say what these may be"""
_PROCESS = ("shardlab", "stages")
"""packages that set a process up, and load public names on first use"""
_OPTIONS = "shardlab.strategy.codec_options"
"""classes of all codecs, of which a stage depends on those of its strategies"""
_CODECS, _ENGINES = "shardlab.codecs.registry", "shardlab.engines.build"
"""load the codecs and the engine of a strategy"""
_KERNELS = "shardlab.kernels.native"
"""loads the library that is built of csrc/"""
_SETTINGS = ("settings.py", "strategy/compression.py", "strategy/sync.py")
"""ends of files whose classes declare parameters"""


def code_keys(values: Params) -> dict[str, Any]:
    """Return the key of each stage, of `train` by run, of `tune` and `timing` by name, and
    `machine` for stages that measure it."""
    graph, users = _graph(), values.codecs
    named = values.all_strategies()
    used = [*named.values(), values.forecast.space]
    # the search trains by engines that no strategy of the experiment has
    searched = [*used, *(Strategy(engine=engine) for engine in ENGINES)]
    keys: dict[str, Any] = {
        stage: _digest(graph, stage, searched if stage == "trial" else used, users)
        for stage in STAGES
    }
    keys["train"] = {
        run: _digest(graph, "train", [strategy], users)
        for run, strategy in values.strategies.items()
    }
    keys["tune"] = {
        name: _digest(graph, "tune", [named[method.strategies[0]]], users)
        for name, method in values.methods.items()
    }
    keys["timing"] = {}
    for name, timing in values.timings.items():
        # what is timed without communication is trained by ddp
        timed = [Strategy(engine="ddp"), *(named[run] for run in timed_runs(timing))]
        keys["timing"][name] = _digest(graph, "timing", timed, users)
    return {**keys, "machine": machine_name(describe_host(), torch_version())}


def timed_runs(timing: Timing) -> set[str]:
    """Return the strategies of a timing and of those that are interleaved with it."""
    return {run for part in (timing, *timing.interleaved.values()) for run in part.runs}


def imported(graph: grimp.ImportGraph, modules: Iterable[str]) -> set[str]:
    """Return modules with all that they import, directly or not, and the packages around each, but
    for what only hands over values that are keys."""
    reached: set[str] = set()
    waiting = [*modules]
    while waiting:
        name = waiting.pop()
        if name in reached or name in _PROCESS or _below(name, _COMPARED_BY_VALUE):
            continue
        reached.add(name)
        waiting += [name.rpartition(".")[0], *graph.find_modules_directly_imported_by(name)]
    return reached


def _below(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of these, or inside of one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "shardlab", "stages", exclude_type_checking_imports=True, cache_dir=None
    )


def _documents(value: Any) -> Iterator[Document]:
    """Return every document in a value, and in these."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _documents(item)
    elif isinstance(value, Document):
        yield value
        yield from _documents([getattr(value, name) for name in type(value).model_fields])


def _digest(
    graph: grimp.ImportGraph, stage: str, used: Sequence[Document], users: tuple[str, ...]
) -> str:
    """Hash the modules that a stage imports with what they load by name.

    Args:
        used: documents with the strategies and codecs that it knows.
        users: modules of users' codecs.
    """
    closure = imported(graph, [f"stages.{stage}"])
    documents = [*_documents(used)]
    specs = {type(document) for document in documents if isinstance(document, CodecSpec)}
    lines: list[str] = []
    if _OPTIONS in closure:
        bases = {base for spec in specs for base in spec.__mro__ if issubclass(base, CodecSpec)}
        lines += sorted(map(_class_digest, bases))
    loaded: set[str] = set()
    if _CODECS in closure:
        loaded |= {_module(spec.factory) for spec in specs}
    if _ENGINES in closure:
        strategies = (document for document in documents if isinstance(document, Strategy))
        loaded |= {_module(strategy.traits.factory) for strategy in strategies}
    library = {name for name in loaded if name.startswith("shardlab.")}
    closure |= imported(graph, library)
    files = {_file(name) for name in closure - {_OPTIONS}}
    packages = {file.parent for file in files}
    files |= {
        file for file in _sources("shardlab") if file.suffix != ".py" and _package(file) in packages
    }
    if _KERNELS in closure:
        files |= {*_sources("csrc")}
    if loaded > library:
        files |= {*_sources(FOLDER)}
        lines += users
    lines += [f"{file} {_file_digest(file)}" for file in sorted(files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _module(factory: Any) -> str:
    """Return the module of a factory, a class or `module:Class`."""
    name = factory if isinstance(factory, str) else factory.__module__
    return str(name.partition(":")[0])


def _file(module: str) -> Path:
    path = Path(*module.split("."))
    package = path / "__init__.py"
    return package if package.exists() else path.with_suffix(".py")


def _sources(folder: str) -> Iterator[Path]:
    """Return the files of a folder without by-products of editors, Python and compilers."""
    for file in Path(folder).rglob("*"):
        hidden = any(part.startswith((".", "__pycache__")) for part in file.parts)
        if file.is_file() and not hidden and not file.name.endswith((".so", "~")):
            yield file


def _package(file: Path) -> Path:
    """Return the folder of the package that a data file belongs to."""
    return next(folder for folder in file.parents if (folder / "__init__.py").exists())


@cache
def _file_digest(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".py":
        content = _tree(content, declares=str(file).endswith(_SETTINGS)).encode()
    return hashlib.sha256(content).hexdigest()


@cache
def _class_digest(kind: type) -> str:
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    return f"{kind.__qualname__} {hashlib.sha256(_tree(source).encode()).hexdigest()}"


def _tree(source: str | bytes, declares: bool = False) -> str:
    """Return the syntax tree of Python as text, without docstrings.

    Args:
        declares: also without the fields of classes, and without their validators.
    """
    tree = _Undocumented().visit(ast.parse(source))
    return ast.dump(_Undeclared().visit(tree) if declares else tree)


class _Undocumented(ast.NodeTransformer):
    """Removes docstrings, of attributes too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


class _Undeclared(ast.NodeTransformer):
    """Removes fields of classes, and validators."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [part for part in node.body if not _declares(part)]
        return node


def _declares(part: ast.stmt) -> bool:
    """Return whether a part of a class is a field or a validator."""
    if isinstance(part, ast.FunctionDef):
        return any("_validator" in ast.dump(decorator) for decorator in part.decorator_list)
    return isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.dump(part.annotation)
