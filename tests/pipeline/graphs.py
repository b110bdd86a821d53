"""The jobs that Snakefile and dvc.yaml describe, read by the tools themselves, and what differs.

Each tool runs in a process of its own, in the folder that holds the files: both keep global state,
and the Snakefile imports the library of that folder.
"""

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

_FOLDERS = ("shardlab", "stages", "csrc", "user_codecs")
_CODE, _PLANS, _READ = "data/code/", "data/plans/", "data/inputs/"
"""of what is there and in the folders of code, digests are compared"""


class Job(NamedTuple):
    """One command: what it reads, writes and depends on. Paths are relative to the root."""

    command: str
    inputs: frozenset[str]
    """files of data; from dvc.yaml also folders"""
    outputs: frozenset[str]
    code: dict[str, str]
    """path → digest"""
    plan: str = ""
    """digest of what it uses of params.yaml"""
    read: dict[str, str] = {}
    """digests of what it reads outside of the experiment"""
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
    """Commands, less `exec python -m stages.`, that Snakemake would run now."""
    jobs = _ask("snakemake-pending", root).values()
    return {job.command.removeprefix("exec python -m stages.") for job in jobs if job.pending}


def differences(dvc: dict[str, Job], snakemake: dict[str, Job]) -> list[str]:
    """Differences between the two descriptions, in words; empty when they are one pipeline."""
    found = [f"only in dvc.yaml: {c}" for c in sorted(dvc.keys() - snakemake.keys())]
    found += [f"only in Snakefile: {c}" for c in sorted(snakemake.keys() - dvc.keys())]
    whole = {output for job in dvc.values() for output in job.outputs}
    for command in sorted(dvc.keys() & snakemake.keys()):
        ours, theirs = dvc[command], snakemake[command]
        for kind, a, b in (
            ("plan", {ours.plan}, {theirs.plan}),
            ("read", set(ours.read.items()), set(theirs.read.items())),
            ("code", set(ours.code.items()), set(theirs.code.items())),
            ("outputs", _files(ours.outputs, theirs.outputs, {}, set()), theirs.outputs),
            ("inputs", _files(ours.inputs, theirs.inputs, snakemake, whole), theirs.inputs),
        ):
            if a != b:
                found.append(f"{command}: {kind}: dvc.yaml {a - b}, Snakefile {b - a}")
    return found


def _files(
    paths: frozenset[str], listed: frozenset[str], jobs: dict[str, Job], whole: set[str]
) -> set[str]:
    """The files that `paths` of dvc.yaml stand for, of those that the Snakefile lists.

    A folder that is an output itself stands for every file below it that a job writes. A folder
    above the outputs of many jobs stands for the files below it that the Snakefile lists, which
    must be some of each of these jobs.
    """
    files: set[str] = set()
    for path in paths:
        below = {file for file in listed if file.startswith(f"{path}/")}
        written = [{f for f in job.outputs if f.startswith(f"{path}/")} for job in jobs.values()]
        if path == "data/contents" and not any(written):
            continue  # nothing lies outside
        if path in whole:
            files |= set().union(*written) or {path}
        elif all(group & below for group in written if group):
            files |= below or {path}
        else:
            files.add(f"{path} (something of every job that writes there)")
    return files


def _ask(tool: str, root: Path) -> dict[str, Job]:
    # not above: what it imports is none of what the tools run in
    from tests.pipeline.workspace import run

    done = run(root, "python", str(Path(__file__).resolve()), tool)
    jobs = [
        Job(**job | {"inputs": frozenset(job["inputs"]), "outputs": frozenset(job["outputs"])})
        for job in json.loads(done.stdout.splitlines()[-1])
    ]
    return {job.command: job for job in jobs}


def _read_dvc() -> list[dict[str, Any]]:
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import Repo

    from shardlab.config.parameters import Parameters
    from stages.code import STAGES, digests
    from stages.content import content_of
    from stages.outside import contents_read, inputs_of_stages
    from stages.plans import plans

    params = Parameters()
    every = plans(params)
    contents = {name: content_of(params, name).sha256 for name in params("inputs")}
    read = contents_read(inputs_of_stages(params), contents)
    jobs = []
    with Repo() as repo:
        for stage in repo.index.stages:
            paths = {d.def_path for d in stage.deps if not isinstance(d, ParamsDependency)}
            whole = any(isinstance(d, ParamsDependency) for d in stage.deps)
            code = [Path(path).stem for path in paths if path.startswith(_CODE)]
            if paths == {*_FOLDERS}:  # digests are made of all
                code = [*STAGES]
            names = [_plan_of(path) for path in paths if path.startswith(_PLANS)]
            reads = [Path(path).stem for path in paths if path.startswith(_READ)]
            data = (p for p in paths if not p.startswith((*_FOLDERS, _CODE, _PLANS, _READ)))
            jobs.append(
                {
                    "name": stage.name.split("@")[0],
                    "command": stage.cmd,
                    "inputs": sorted(data),
                    "outputs": sorted(out.def_path for out in stage.outs),
                    "code": {p: d for stage in code for p, d in digests(stage).items()},
                    "read": {name: d for stage in reads for name, d in read[stage].items()},
                    "plan": _sha("".join(every[n] for n in (every if whole else names))),
                }
            )
    return jobs


def _plan_of(path: str) -> str:
    return path.removeprefix(_PLANS).removesuffix(".json")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_snakemake(force: bool) -> list[dict[str, Any]]:
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
                "command": " ".join(shlex.split(job.shellcmd)),
                "inputs": sorted(p for p in map(str, job.input) if not p.startswith(_FOLDERS)),
                "outputs": sorted(map(str, job.output)),
                "code": dict(job.params.get("code", {})),
                "read": dict(job.params.get("read", {})),
                "plan": job.params.get("plan", _sha("")),
                "pending": workflow.dag.needrun(job),
            }
            for job in workflow.dag.jobs
            if job.output
        ]


if __name__ == "__main__":
    TOOLS = {
        "dvc": _read_dvc,
        "snakemake": lambda: _read_snakemake(force=True),
        "snakemake-pending": lambda: _read_snakemake(force=False),
    }
    print(json.dumps(TOOLS[sys.argv[1]]()))
