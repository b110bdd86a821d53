"""Write an experiment on your text into a new folder: params.yaml, a git repository, and the files
of Snakemake and DVC. What no option says is asked where a person can answer.

In the folder of an experiment that is there, as after a clone or a new version of shardlab, write
the files of both tools again; params.yaml stays.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from shardlab.cli import questions
from shardlab.config.parameters import Parameters
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.core.progress import say
from shardlab.data.local_files import open_packed
from shardlab.data.settings import Data, Tokenize, source_of
from shardlab.data.source_records import RecordCounts
from shardlab.data.sources import read_documents
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.train.settings import Train
from stages.folder import make_folder
from stages.search import Minutes, Ranks

_STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp-int8": {"engine": "ddp", "gradients": {"codec": "int8"}},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-int8": {"engine": "fsdp2", "gradients": {"codec": "int8"}},
}
_SEEDS = [0, 1]
_JOBS = len(_STRATEGIES) * (len(_SEEDS) + 2) + 15
"""training, profile and validate of each run, and the other stages"""
_TRAINING, _TIMING, _RACE = 0.5, 0.125, 0.25
"""shares of the time: training, each of two timings, and the races of the search"""
_LEAST_STEPS = 20
_SHARE = Data.model_fields["validation_share"].default


def main(folder: str, **answers: str | None) -> None:
    """Write the folder.

    Args:
        answers: to the questions of `shardlab.cli`; None: not answered yet.
    """
    # of imports, which are those of most stages
    start_s = time.process_time()
    target = Path(folder).absolute()
    params = target / "params.yaml"
    if params.exists():
        if any(answers.values()):
            raise UserError(f"{params} is there already: change that file, or name another folder")
        make_folder(params, target)
        say(f"init: files of the pipeline written again, {params} is as it was")
        return
    if target.exists() and {path.name for path in target.iterdir()} - {".git"}:
        raise UserError(f"{target}: not empty, and no experiment: name a new folder")
    tree, note = _parameters(_completed(answers), start_s)
    make_folder(_text(tree), target)
    Parameters(params).complete()
    say(f"init: {params}: {note}\ninit: start it with: cd {target} && shardlab run")


def _completed(answers: dict[str, str | None]) -> dict[str, str]:
    """Return the answers; absent ones are asked for, or have their defaults."""
    completed = {}
    for name, (words, default) in questions().items():
        answer = answers[name]
        if answer is None and sys.stdin.isatty():
            answer = input(f"{words} [{default}]: ").strip()
        completed[name] = answer or default
    return completed


def _parameters(answers: dict[str, str], start_s: float) -> tuple[dict[str, Any], str]:
    """Return the parameters of an experiment that takes about the time, and what it is in words.

    Args:
        start_s: CPU seconds until a stage has imported what it needs.
    """
    model = {"preset": answers["model"]}
    data, inputs = _data(answers["text"])
    ranks = validate(Ranks, answers["world_size"], "--world-size")
    minutes = validate(Minutes, answers["minutes"], "--minutes")
    rate = answers["link"]
    link = None if rate == "none" else validate(Link, rate, "--link")
    step_s, count = _step(validate(Model, model, "--model"))
    step_s *= max(1.0, ranks / len(os.sched_getaffinity(0)))
    # what a ring sends of float32 gradients
    link_s = 8 * 4 * count * 2 * (ranks - 1) / ranks / link.bits_per_second if link else 0.0
    left_s = 60.0 * minutes - _JOBS * start_s
    runs = len(_STRATEGIES)
    trained = runs * len(_SEEDS)
    steps = int(_TRAINING * left_s / trained / step_s)
    if steps < _LEAST_STEPS:
        needed = (_JOBS * start_s + _LEAST_STEPS * trained * step_s / _TRAINING) / 60
        raise UserError(
            f"--minutes {minutes}: {trained} runs of {answers['model']} with steps of "
            f"{1000 * step_s:.0f} ms take more: give {needed + 1:.0f}"
        )

    def timing(seconds: float, **more: Any) -> dict[str, Any]:
        # of each run and without communication, and two of one rank
        repetition_s = (runs + 1) * seconds + 2 * step_s
        repetitions = max(5, min(200, int(_TIMING * left_s / repetition_s)))
        return {"world_size": ranks, "repetitions": repetitions, **more}

    timings = {"loopback": timing(step_s)}
    agent: dict[str, Any] = {"trial_timeout_s": round(_RACE * left_s)}
    if link:
        timings["link"] = timing(step_s + link_s, link=rate)
        agent = {"link": rate, **agent}
    for name, timed in timings.items():
        # one device alone, beside which the verdict puts all others
        single = {"runs": ["ddp"], "world_size": 1, "repetitions": timed["repetitions"]}
        timed["interleaved"] = {f"one-rank-{name}": single}
    tree = {
        "inputs": inputs,
        "methods": {},
        "data": data,
        "model": model,
        "train": {"world_size": ranks, "steps": steps},
        "strategies": _STRATEGIES,
        "seeds": _SEEDS,
        "baseline": "ddp",
        "timings": timings,
        "agent": agent,
        "rounds": {"1": {"after": "results/results.jsonl"}},
    }
    return tree, (
        f"{count:,} parameters, {trained} runs of {steps} steps, sized for {minutes} minutes of "
        f"this machine without other work, by a step of {1000 * step_s:.0f} ms"
    )


def _data(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections `data` and `inputs`."""
    if text in ("wikipedia", "synthetic"):
        return {"source": text}, {}
    path = Path(text).absolute()
    if not path.exists():
        raise UserError(f"--text {text}: no such file or folder; give one, or wikipedia")
    data = {"source": source_of(str(path)), "path": str(path)}
    if data["source"] == "text":
        data |= _split(path) if path.is_file() else {}
        # records may need data.text_column, which is set in what init writes
        counts = RecordCounts("skip", f"--text {text}")
        documents = read_documents(validate(Data, data, "--text"), Path(".work"), counts)
        if next(documents, None) is None:
            raise counts.no_documents()
    return data, {"text": str(path)}


def _split(path: Path) -> dict[str, Any]:
    """Return how a text is cut into documents, some of which are to validate, by its first MB."""
    with open_packed(path) as file:
        text = file.read(1 << 20)
    # one document would leave none to validate
    mark = b"<|endoftext|>"
    cut, own = (mark, {}) if mark in text else (b"\n\n", {"separator": "\n\n"})
    # as many in each MB; of a packed file at least those of its own size
    times = max(1.0, path.stat().st_size / max(len(text), 1))
    # documents are drawn by their hash: of ten expected ones there are some
    share = 10 / (times * text.count(cut) + 1)
    return own | ({"validation_share": round(min(share, 0.5), 2)} if share > _SHARE else {})


def _step(model: Model) -> tuple[float, int]:
    """Return the CPU seconds of a training step on one thread, and the number of parameters."""
    train, vocabulary = Train(), Tokenize().for_model(model.pretrained).vocabulary
    assert vocabulary is not None, "of a preset"
    step = train.step_size(train.world_size)
    torch.set_num_threads(train.threads)
    module = build_model(model, vocabulary, train.sequence_length, 0, seed=0).whole()
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.randint(vocabulary, (step.batch_size, step.sequence_length))
    seconds = []
    for _ in range(4):
        start_s = time.process_time()
        logits = module(input_ids=tokens).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start_s)
    # the first one allocates
    return min(seconds[1:]), sum(parameter.numel() for parameter in module.parameters())


def _text(tree: dict[str, Any]) -> str:
    """Return parameters as YAML of a line each, and one for each strategy and timing."""
    lines = ["# shardlab init; workflow/schemas/params.schema.json describes every key"]
    for key, value in tree.items():
        if key in ("strategies", "timings"):
            lines += [f"{key}:", *(f"  {name}: {_flow(each)}" for name, each in value.items())]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join([*lines, ""])


class _Dumper(yaml.SafeDumper):
    """Writes line breaks as \\n, so that a value stays on its line."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\n" in text else None
    )


_Dumper.add_representer(str, _write_text)


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=1000)
    return str(text).partition("\n")[0]
