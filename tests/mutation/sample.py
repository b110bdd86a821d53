"""Mutation testing: small faults are put into the code, and its tests have to notice them.

cosmic-ray 8.7.0 makes the faults (mutants) and runs the tests. It is in no lock file, since it runs
by hand, from the root of the repository:

    pip install cosmic-ray==8.7.0
    nice -n 19 python tests/mutation/sample.py agent feedback codecs collectives checkpoints

A part has hundreds of mutants, so a sample is drawn with `SEED`: some places of the code, and one
mutant of each. All happens in a copy, `.work/mutation/PART`, where `session.sqlite` stays for
`cosmic-ray dump`. What survives is printed with its diff: either a test is missing, or the mutant
does the same as the original. A timeout counts as killed.
"""

import ast
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

COMM = "shardlab/comm/{collective,codec_collective,all_to_all,bypass,hierarchy,multi_phase}.py"
COMM_TESTS = (
    "tests/comm/test_{all_to_all,bypass,hierarchy,asynchronous_forms,multi_phase_coll*,"
    "payload_errors}.py"
)
# multi-phase methods and buffers of messages are tested where their ranks are; nothing needs a GPU
CODEC_TESTS = (
    "tests/codecs/test_{golden*,registry,signs,sparse,randomk,integer*,wire}.py "
    "tests/comm/test_{multi_phase_{methods,laws},all_to_all}.py tests/codecs/test_codec_laws.py"
)
FEEDBACK = "shardlab/comm/{feedback,residuals}.py"
# only attached models have optimizers, whose steps end those of error feedback
FEEDBACK_TESTS = "tests/comm/test_{feedback,residual_merging,attach_weights,attach_steps}.py"
AGENT = (
    "shardlab/agent/{decisions/decision,trials/trials,records/{history,numerics},races/sequential,"
    "space/*,proposals/{proposal,judge,shortlist,supervision}}.py"
)
# rounds on real ranks take a minute, and a mutant that other tests kill needs no search
AGENT_TESTS = (
    "tests/agent/test_{trials,history,judge,supervision,proposal,decision,sequential,space,search}"
    ".py"
)
# all engines take minutes for each survivor
FEW = "-k 'not fsdp1 and not slide and not ddp'"
# part: modules, tests, options of pytest, mutants; to be changed where modules move
PARTS = {
    "agent": (AGENT, AGENT_TESTS, "", 32),
    "feedback": (FEEDBACK, FEEDBACK_TESTS, "", 32),
    "codecs": ("shardlab/codecs/*.py", CODEC_TESTS, "", 14),
    "collectives": (COMM, COMM_TESTS, "", 32),
    "checkpoints": ("shardlab/checkpoint/*.py", "tests/checkpoint/test_checkpoint_*.py", FEW, 25),
}
SEED = 1
# `==` for `is` and the reverse: the same for None and for short strings, or an error at once
NOISE = re.compile(r"Operator_(Is|IsNot)_(?!Is)|Operator_(?!Is)\w+_(Is|IsNot)$")
LEFT_OUT = {"build", "data", "logs", "results"}


def quiet(source: str) -> Iterator[ast.expr]:
    """Yield places where no test can or should notice a change: types, and texts of errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield from (each for each in node.decorator_list if "abstract" in ast.unparse(each))
            yield from [node.returns] if node.returns else []
        elif isinstance(node, ast.Raise) and node.exc:
            yield node.exc
        elif isinstance(node, ast.Module):  # aliases of types
            values = [each.value for each in node.body if isinstance(each, ast.Assign)]
            yield from (each for each in values if isinstance(each, ast.BinOp | ast.Subscript))


def is_quiet(mutation: MutationSpec, source: str) -> bool:
    """Whether the mutant lies in such a place; a decorator's begins one column early, with `@`."""
    at = mutation.start_pos[0], mutation.start_pos[1] + 1
    spans = [(e.lineno, e.col_offset, e.end_lineno, e.end_col_offset) for e in quiet(source)]
    return any(span[:2] <= at < span[2:] for span in spans)


def changes_code(mutation: MutationSpec, source: str) -> bool:
    """Whether the mutant is Python at all, and another program than the original."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        tree = ast.parse(mutate_code(source, operator, mutation.occurrence))
        compile(tree, "mutant", "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def draw(database: WorkDB, part: str) -> None:
    """Marks all mutants as skipped but those of the sample."""
    generator = random.Random(f"{SEED} {part}")
    places: dict[tuple[object, ...], list[tuple[MutationSpec, str]]] = {}
    for item in database.work_items:
        (each,) = item.mutations
        place = (str(each.module_path), each.start_pos, each.end_pos)
        places.setdefault(place, []).append((each, item.job_id))
    chosen: set[str] = set()
    for place in generator.sample(sorted(places), len(places)):
        source = Path(str(place[0])).read_text()
        mutants = sorted(places[place], key=lambda m: (m[0].operator_name, m[0].occurrence))
        if len(chosen) == PARTS[part][3] or is_quiet(mutants[0][0], source):
            continue
        for each, job in generator.sample(mutants, len(mutants)):
            if not NOISE.search(each.operator_name) and changes_code(each, source):
                chosen.add(job)
                break
    others = [item.job_id for item in database.work_items if item.job_id not in chosen]
    database.set_multiple_results(others, WorkResult(WorkerOutcome.SKIPPED))


def expand(pattern: str) -> list[str]:
    """The files of a pattern of bash, in its order.

    Raises:
        SystemExit: a part of the pattern matches no file.
    """
    # without failglob or nullglob, bash leaves what matches nothing as it is written
    words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {pattern}"], text=True).split()
    if missing := [word for word in words if not Path(word).is_file()]:
        sys.exit(f"{' '.join(missing)}: no such file: change PARTS in {sys.argv[0]}")
    return words


def left_out(folder: str, names: list[str]) -> list[str]:
    """Names that no test reads: outputs, at the root alone, and whatever is hidden or cached."""
    outputs = LEFT_OUT if Path(folder) == Path.cwd() else set()
    return [n for n in names if n.startswith(".") or n == "__pycache__" or n in outputs]


def examine(part: str) -> None:
    """Runs a sample of a part's mutants, and prints how many were killed and which were not."""
    modules, tests, options, _ = PARTS[part]
    copy = Path(".work/mutation", part).absolute()
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(Path.cwd(), copy, ignore=left_out)
    pytest = f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m 'not long' --timeout 300"
    settings = {
        "module-path": expand(modules),
        "test-command": f"{pytest} {options} {shlex.join(expand(tests))}",
        "timeout": 900,
        "distributor.name": "local",
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    Path(copy, "config.toml").write_text("\n".join(["[cosmic-ray]", *lines, ""]))
    # under `CI` Hypothesis draws the same examples every time, and keeps none
    environment = os.environ | {"CI": "1", "PYTHONPATH": str(copy)}

    def cosmic_ray(*arguments: str) -> None:
        subprocess.run(["cosmic-ray", *arguments], cwd=copy, env=environment, check=True)

    cosmic_ray("baseline", "config.toml")
    cosmic_ray("init", "config.toml", "session.sqlite", "--force")
    with use_db(str(copy / "session.sqlite"), WorkDB.Mode.open) as database:
        draw(database, part)
        cosmic_ray("exec", "config.toml", "session.sqlite")
        done = [r for _, r in database.completed_work_items if r.test_outcome is not None]
    survived = [each for each in done if each.test_outcome == TestOutcome.SURVIVED]
    timeouts = sum(each.output == "timeout" for each in done)
    print(f"{part}: {len(done)} mutants, {len(done) - len(survived)} killed ({timeouts} timeouts)")
    print(*(each.diff for each in survived), sep="\n", flush=True)


if __name__ == "__main__":
    for modules, tests, *_ in PARTS.values():  # now, and not once the parts before it are done
        expand(modules), expand(tests)
    for name in sys.argv[1:] or PARTS:
        examine(name)
