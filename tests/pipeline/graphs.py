"""The jobs that Snakefile and dvc.yaml describe, read by the tools themselves, and what differs.

Each tool runs in a process of its own, in the folder that holds the files: both keep global state,
and the Snakefile imports the library of that folder.
"""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

_FOLDERS = ("shardlab", "stages", "csrc", "user_codecs")
_CODE, _PARAMETERS = "data/code.yaml", "data/params.yaml"


class Job(NamedTuple):
    """One command: what it reads, writes and depends on. Paths are relative to the root."""

    command: str
    inputs: frozenset[str]
    """files of data; from dvc.yaml also folders"""
    outputs: frozenset[str]
    code: dict[str, str]
    """key of data/code.yaml → digest"""
    parameters: dict[str, Any]
    """key of data/params.yaml → value"""
    name: str = ""
    """rule, or stage without its item"""
    pending: bool = False
    """Snakemake would run it now"""


def dvc_jobs(root: Path) -> dict[str, Job]:
    """Jobs by command."""
    return _ask("dvc", root)


def snakemake_jobs(root: Path) -> dict[str, Job]:
    """Jobs by command."""
    return _ask("snakemake", root)


def pending(root: Path) -> set[str]:
    """Commands, less `exec python -m shardlab `, that Snakemake would run now."""
    jobs = _ask("snakemake-pending", root).values()
    return {job.command.removeprefix("exec python -m shardlab ") for job in jobs if job.pending}


def wanted(root: Path) -> frozenset[str]:
    """Files that Snakemake makes where nothing is asked for."""
    return _ask("snakemake-wanted", root)[""].inputs


def differences(dvc: dict[str, Job], snakemake: dict[str, Job]) -> list[str]:
    """Differences between the two descriptions, in words; empty when they are one pipeline."""
    found = [f"only in dvc.yaml: {c}" for c in sorted(dvc.keys() - snakemake.keys())]
    found += [f"only in Snakefile: {c}" for c in sorted(snakemake.keys() - dvc.keys())]
    for command in sorted(dvc.keys() & snakemake.keys()):
        one, other = dvc[command], snakemake[command]
        found += [
            f"{command}: {kind}: dvc.yaml {a}, Snakefile {b}"
            for kind, a, b in (
                ("code", one.code, other.code),
                ("parameters", one.parameters, other.parameters),
            )
            if a != b and other.name != "params"  # which depends on whole files
        ]
        for kind in ("inputs", "outputs"):
            a, b = getattr(one, kind), getattr(other, kind)
            # a folder of dvc.yaml stands for the files below it
            loose = {path for path in b if not any(path == p or _below(path, p) for p in a)}
            empty = {p for p in a if p not in b and not any(_below(path, p) for path in b)}
            if loose or empty - {"data/inputs", "results/tune"}:
                found.append(
                    f"{command}: {kind}: dvc.yaml {sorted(empty)}, Snakefile {sorted(loose)}"
                )
    return found


def _below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _ask(tool: str, root: Path) -> dict[str, Job]:
    # not above: what it imports is none of what the tools run in
    from tests.pipeline.workspace import run

    script = str(Path(__file__).resolve())
    done = run(root, "env", f"PYTHONPATH={root}", "python", script, tool)
    jobs = [
        Job(**job | {"inputs": frozenset(job["inputs"]), "outputs": frozenset(job["outputs"])})
        for job in json.loads(done.stdout.splitlines()[-1])
    ]
    return {job.command: job for job in jobs}


def _read_dvc() -> list[dict[str, Any]]:
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import Repo

    from shardlab.config.parameters import Parameters
    from stages.code import code_keys
    from stages.params import parameter_keys

    values = Parameters().complete()
    trees = {_CODE: code_keys(values), _PARAMETERS: parameter_keys(values)}
    jobs = []
    with Repo() as repo:
        for stage in repo.index.stages:
            keyed = [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]
            values = {
                dep.def_path: {key: _value(trees[dep.def_path], key) for key in dep.params}
                for dep in keyed
                if dep.def_path in trees
            }
            paths = {dep.def_path for dep in stage.deps if dep not in keyed}
            jobs.append(
                {
                    "name": stage.name.split("@")[0],
                    "command": stage.cmd,
                    "inputs": sorted(path for path in paths if not path.startswith(_FOLDERS)),
                    "outputs": sorted(out.def_path for out in stage.outs),
                    "code": values.get(_CODE, {}),
                    "parameters": values.get(_PARAMETERS, {}),
                }
            )
    return jobs


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _read_snakemake(force: bool, targets: bool = False) -> list[dict[str, Any]]:
    from snakemake.api import OutputSettings, SnakemakeApi
    from snakemake.settings.types import DAGSettings, Quietness, ResourceSettings

    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL}, dryrun=True)) as api:
        flow = api.workflow(ResourceSettings(cores=1), snakefile=Path("Snakefile"))
        # large files are compared by content too, as in profiles/default
        flow.dag(DAGSettings(forceall=force, max_checksum_file_size=10 * 1000**3))
        workflow = flow._workflow  # 9.27 has no public way to the jobs of a DAG
        workflow._prepare_dag(forceall=force, ignore_incomplete=True, lock_warn_only=False)
        workflow._build_dag()
        return [
            {
                "name": job.rule.name,
                # jobs of Snakemake write into their logs, stages of DVC on the terminal
                "command": " ".join(shlex.split(job.shellcmd or "")).partition(" &>> ")[0],
                "inputs": sorted(
                    p for p in map(str, job.input) if not p.startswith((*_FOLDERS, "/"))
                ),
                "outputs": sorted(map(str, job.output)),
                "code": job.params.get("code", {}),
                "parameters": job.params.get("parameters", {}),
                "pending": workflow.dag.needrun(job),
            }
            for job in workflow.dag.jobs
            if bool(job.output) != targets
        ]


if __name__ == "__main__":
    import sys

    TOOLS = {
        "dvc": _read_dvc,
        "snakemake": lambda: _read_snakemake(force=True),
        "snakemake-wanted": lambda: _read_snakemake(force=True, targets=True),
        "snakemake-pending": lambda: _read_snakemake(force=False),
    }
    print(json.dumps(TOOLS[sys.argv[1]]()))
