"""Cache keys of code: what each stage imports, as digests that both tools compare.

A stage depends on every module of the library that it imports, directly or not, with the packages
around each, found by grimp. Python is compared by its syntax tree without docstrings and comments.
What no import shows is added: data files of these packages, the C++ sources behind the kernels,
the modules of codecs and engines, and the machine where a stage measures time.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grimp

from shardlab.config.parameters import Parameters
from shardlab.core.document import Document
from shardlab.core.host import describe_host, torch_version
from shardlab.results.timing_result import machine_name
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import BUILT_IN, FOLDER
from shardlab.strategy.document import Strategy
from shardlab.strategy.engine_traits import ENGINES

STAGES = (
    *("prepare", "tokenize", "profile", "validate", "timing", "calibrate", "forecast"),
    *("estimate", "collect", "propose", "trial", "decide", "report", "readme"),
)
"""stages with one key; `train` has one for each run, `tune` for each method"""
_ENCODING = ("timing", "calibrate", "estimate", "trial")
"""stages that make codecs of any strategy: those of users are part of their keys"""
_BUILDER = "shardlab.engines.build"
"""loads the engine of a strategy"""
_KERNELS = "shardlab.kernels.native"
"""loads the library that is built of csrc/"""
_COMMAND_LINE = "shardlab.cli"
"""hands over arguments, of which parameters are keys"""


def code_keys(params: Parameters) -> dict[str, Any]:
    """Return the key of each stage, of `train` by run and of `tune` by method, and `machine` for
    stages that measure it."""
    graph = _graph()
    users = params("codecs")
    codecs = [_module(spec.factory) for spec in BUILT_IN.values()]
    engines = [_module(traits.factory) for traits in ENGINES.values()]
    keys: dict[str, Any] = {}
    for stage in STAGES:
        encoding = stage in _ENCODING
        modules = [f"stages.{stage}", *(codecs if encoding else ())]
        if _BUILDER in imported(graph, modules):
            modules += engines
        keys[stage] = _digest(graph, modules, users if encoding else ())
    keys["train"] = {
        run: _digest(graph, *_of_run("train", strategy, users))
        for run, strategy in params("strategies").items()
    }
    strategies = params.all_strategies()
    keys["tune"] = {
        name: _digest(graph, *_of_run("tune", strategies[method.strategies[0]], users))
        for name, method in params("methods").items()
    }
    return {**keys, "machine": machine_name(describe_host(), torch_version())}


def imported(graph: grimp.ImportGraph, modules: Iterable[str]) -> set[str]:
    """Return modules with all that they import, directly or not, and the packages around each."""
    known: set[str] = set()
    waiting = [*modules]
    while waiting:
        name = waiting.pop()
        if name in known or name == _COMMAND_LINE:
            continue
        known.add(name)
        package = name.rpartition(".")[0]
        waiting += [package] if package else []
        if name != "shardlab":  # it loads its public names on first use, and no stage uses them so
            waiting += graph.find_modules_directly_imported_by(name)
    return known


def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "shardlab", "stages", exclude_type_checking_imports=True, cache_dir=None
    )


def _of_run(
    stage: str, strategy: Strategy, users: tuple[str, ...]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the modules that a stage which trains by a strategy imports, and the modules of users'
    codecs."""
    full = strategy.canonical()
    factories = [_module(type(codec).factory) for codec in _codecs(full)]
    own = [name for name in factories if name.startswith("shardlab.")]
    modules = [f"stages.{stage}", _module(full.traits.factory), *own]
    return modules, users if len(own) < len(factories) else ()


def _codecs(value: Any) -> Iterator[CodecSpec]:
    """Return every codec in a document."""
    if isinstance(value, CodecSpec):
        yield value
    elif isinstance(value, Document):
        for name in type(value).model_fields:
            yield from _codecs(getattr(value, name))


def _module(factory: Any) -> str:
    """Return the module of a factory, a class or `module:Class`."""
    name = factory if isinstance(factory, str) else factory.__module__
    return str(name.partition(":")[0])


def _digest(graph: grimp.ImportGraph, modules: Iterable[str], users: tuple[str, ...]) -> str:
    """Hash modules with all that they import, and the modules of users' codecs."""
    closure = imported(graph, modules)
    files = {_file(name) for name in closure}
    packages = {file.parent for file in files}
    files |= {
        file for file in _sources("shardlab") if file.suffix != ".py" and _package(file) in packages
    }
    if _KERNELS in closure:
        files |= {*_sources("csrc")}
    if users:
        files |= {*_sources(FOLDER)}
    digest = hashlib.sha256(repr([*users]).encode())
    for file in sorted(files):
        digest.update(f"{file} {_file_digest(file)}\n".encode())
    return digest.hexdigest()[:16]


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
        content = ast.dump(_Undocumented().visit(ast.parse(content))).encode()
    return hashlib.sha256(content).hexdigest()


class _Undocumented(ast.NodeTransformer):
    """Removes docstrings, of attributes too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
