"""Code that a stage imports and reads, compared with what `stages.code` says.

`python -m tests.pipeline.closure` prints the size of the code and the wasted dependencies.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import grimp

from shardlab.config.codec_table import built_in
from stages.code import STAGES, paths


def import_graph() -> grimp.ImportGraph:
    """Every import of the library and the stages, those inside of functions too.

    The registry imports the modules of codecs by the names in their specifications.
    """
    graph = grimp.build_graph(
        "shardlab", "stages", exclude_type_checking_imports=True, cache_dir=None
    )
    for spec in built_in().values():
        module = str(spec.factory).partition(":")[0]
        graph.add_import(importer="shardlab.codecs.registry", imported=module)
    return graph


def imported(graph: grimp.ImportGraph, module: str) -> set[str]:
    """`module`, all that it imports directly or not, and the packages around each."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        package = name.rpartition(".")[0]
        waiting += [package] if package else []
        if name != "shardlab":  # it loads its public names on first use, and no stage uses them so
            waiting += graph.find_modules_directly_imported_by(name)
    return found


def complaints(
    graph: grimp.ImportGraph, root: Path, stage: str, declared: Iterable[str]
) -> list[str]:
    """Imports that `declared`, the code that a stage depends on, lacks, or names in vain."""
    files = files_of(graph, root, stage)
    holds = {path: {f for f in files if _in(f, path)} for path in declared}
    missing = files - set().union(*holds.values())
    return [f"{stage}: not declared: {file}" for file in sorted(missing)] + [
        f"{stage}: declared for nothing: {path}" for path in sorted(holds) if not holds[path]
    ]


def files_of(graph: grimp.ImportGraph, root: Path, stage: str) -> set[str]:
    """Files of code that a stage runs; an __init__.py that only describes its package runs none."""
    paths = {file_of(root, module) for module in imported(graph, f"stages.{stage}")}
    files = {path for path in paths if not _only_describes(root / path)}
    if any(file.startswith("shardlab/codecs/") for file in files):
        files.add("csrc/CMakeLists.txt")  # what the bindings load is built there
    if any(file.startswith("shardlab/codecs/") for file in files):
        files.add("user_codecs/README.md")  # those of the user are imported from there
    return files | {"stages/__init__.py"}


def wasted_share(
    graph: grimp.ImportGraph, root: Path, stage: str, declared: Iterable[str]
) -> float:
    """Lines of Python that a stage declares and does not import, as a share of those declared."""
    used = files_of(graph, root, stage)
    lines = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("shardlab", "stages")
        for path in (root / folder).rglob("*.py")
    }
    held = {file: n for file, n in lines.items() if any(_in(file, path) for path in declared)}
    return sum(n for file, n in held.items() if file not in used) / sum(held.values())


def _in(file: str, path: str) -> bool:
    return file == path or file.startswith(f"{path}/")


def _only_describes(file: Path) -> bool:
    return file.name == "__init__.py" and len(ast.parse(file.read_text("utf-8")).body) <= 1


def file_of(root: Path, module: str) -> str:
    path = Path(*module.split("."))
    package = path / "__init__.py"
    return str(package if (root / package).exists() else path.with_suffix(".py"))


def plans_read(source: str) -> set[str]:
    """Functions of `stages.plans` that a stage calls, and `*` where it reads more."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    plans = {
        f.attr
        for f in calls
        if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "plans"
    }
    others = any(isinstance(f, ast.Name) and f.id == "params" for f in calls)
    return plans | ({"*"} if others else set())


def main() -> None:
    """Print files and lines of code, and the share of wasted code dependencies of each stage."""
    root = Path(__file__).parents[2]
    for folder in ("shardlab", "benchmarks", "tests"):
        files = [*(root / folder).rglob("*.py")]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(f"{folder}: {lines} lines in {len(files)} files")
    graph = import_graph()
    for stage in STAGES:
        print(f"{stage}: {wasted_share(graph, root, stage, paths(stage)):.1%}")


if __name__ == "__main__":
    main()
