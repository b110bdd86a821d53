"""The project's answers to its users' questions, computed anew from what is committed.

    python -m tests.answers.questions

writes them to a JSON file per question, beside this module. Strategies are named and hashed,
numbers keep six digits, and no type of the library occurs, so that the files outlive its code.
"""

import json
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.judge import question_of
from shardlab.choose.decision import conclude
from shardlab.choose.history import History, initial_history
from shardlab.choose.incumbent import best_measured
from shardlab.choose.judge import Question, choose_by_rules
from shardlab.choose.probe_answer import STOCK, rank_replicas, replicas_of
from shardlab.choose.records import Proposal, Trial
from shardlab.cli import main
from shardlab.config.parameters import Parameters
from shardlab.report.answer import answer
from shardlab.report.evidence import Evidence
from shardlab.report.loss_times import compare_links, ways_of
from shardlab.report.timings import location
from shardlab.report.verdict import Choice, verdicts
from shardlab.results.files import read_results, read_timings
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import turns
from shardlab.results.timing_result import TimingResult
from shardlab.results.train_result import TrainResult
from stages.report import tuned_of
from stages.sections import Sections
from tests.evidence_factory import make_evidence

Answer = dict[str, Any]
"""Answers to a question, as JSON."""
FOLDER = Path(__file__).parent
STORED = Path("benchmarks/judge_questions.json")
"""Questions to judges, drawn from the timings of the default experiment."""
PLAN = "llama-3-8b --nodes 2x8 --device a100-80g --link 10gbit"
"""Arguments of the plan in README.md; docs/tutorials/plan.md has its text."""
SMALL_PLAN = "gpt2 --nodes 2x1 --device l4 --seq 512"
"""Arguments, without the link, of a plan for two machines of one device."""
_BYTES = {STOCK: 1.0, "int8": 0.26, "int4": 0.13}
"""Bytes of a payload over those of float32, with a scale per 128 elements."""


class Experiment(NamedTuple):
    """An experiment whose results are committed."""

    params: Parameters
    results: Path


def experiments() -> dict[str, Experiment]:
    """Return the experiments by name; this and all else is read from the current folder."""
    return {
        "default": Experiment(Parameters(), Path("results")),
        "judge": Experiment(Parameters("params/judge.yaml"), Path("experiments/judge/results")),
    }


def strategies() -> Answer:
    """Which strategy does each name in params.yaml and params/*.yaml stand for?"""
    files = [Path("params.yaml"), *sorted(Path("params").glob("*.yaml"))]
    return {
        str(file): {name: s.hash() for name, s in Parameters(file).all_strategies().items()}
        for file in files
    }


def link_verdicts() -> Answer:
    """What does the report recommend on each link, and how sure is it?"""
    answers = {}
    for name, experiment in experiments().items():
        evidence = _evidence(experiment)
        lines = answer(evidence).lines
        answers[name] = {
            location(link.timing): {
                "use": link.use and _choice(link.use),
                "lossless": link.lossless and _choice(link.lossless),
                "not told apart": [choice.name for choice in link.same],
                "faster, but refused": [choice.name for choice in link.refused],
                "synchronisation / computation": link.sync_ratio,
                "sentence": line,
            }
            for link, line in zip(verdicts(evidence), lines, strict=True)
        }
    return answers


def rounds() -> Answer:
    """What does each round of a search decide, and which strategy does it hold?"""
    answers: Answer = {}
    for name, (params, results) in experiments().items():
        history, answers[name] = _first_history(params, results), {}
        for number in params("rounds"):
            agent, proposal = params.complete().agent_of(number), _proposal(results, number)
            limits = agent.quality_tolerance, proposal.memory_limit_bytes, proposal.peaks
            fastest_before = best_measured(history, *limits).hash
            trial = Trial.from_file(results / "rounds" / number / "trial.json", "restore it")
            history = conclude(history, proposal, trial, agent)
            decision = history.rounds[-1]
            answers[name][number] = {
                "fastest admissible before": fastest_before,
                "decision": decision.decision,
                "held": decision.held,
                "reason": decision.reason,
                "step over the incumbent's": {
                    arm.label: arm.step and [arm.step.ratio, arm.step.low, arm.step.high]
                    for arm in decision.compared
                },
                "objections": {arm.label: arm.objections for arm in decision.compared},
            }
    return answers


def judged() -> Answer:
    """What does the judge `rules` choose in each committed round, and of each stored question?"""
    answers: Answer = {}
    for name, (params, results) in experiments().items():
        for number in params("rounds"):
            proposal = _proposal(results, number)
            held_ms = proposal.arms[0].prediction.step_ms
            question = Question(proposal.evidence, held_ms, proposal.candidates)
            answers[f"{name}, round {number}"] = _choice_by_rules(question)
    for number, entry in enumerate(json.loads(STORED.read_text()), 1):
        answers[f"stored question {number}, {entry['link']}"] = _choice_by_rules(question_of(entry))
    return answers


def islands() -> Answer:
    """What reaches one loss first on each link?"""
    folder = Path("experiments/islands/results")
    params = Sections("params/islands.yaml")
    timings = params("timings", dict[str, Timing])
    timed = only(read_timings(folder / "timings", timings), TimingResult)
    tuned, answers = tuned_of(params, folder), {}
    assert tuned is not None, "the experiment has methods"
    ways = [way for way in ways_of(tuned) if way.curve.steps]
    for comparison in compare_links(timed, turns(timings), tuned):
        best, link = comparison.order[0], comparison.link
        gains = comparison.gains().items()
        answers[link.name] = {
            "synchronisation / computation": link.ratio,
            "first": best.title,
            "gain over the best of each kind": {
                family: [way.title, *gain] for family, (gain, way) in gains
            },
            "not told apart": [way.title for way in comparison.same_as(best)],
            "seconds to the loss": {way.title: link.seconds(way) for way in ways if link.has(way)},
        }
    return answers


def plans() -> Answer:
    """What does `shardlab plan` of README.md advise, and what two machines on several links?"""
    plan, rates = _planned(PLAN), ("100mbit", "1gbit", "10gbit", "25gbit", "100gbit", "400gbit")
    return {
        PLAN: {
            "sentence": plan["answer"],
            "use": _used(plan),
            "step, s": {
                row["name"]: row["step_s"]["middle"] if row["fits"] else "does not fit"
                for row in plan["strategies"]
            },
            "one node alone, s": plan["one_node"]["step_s"]["middle"],
            "one device alone, s": plan["one_device"]["step_s"]["middle"],
        },
        SMALL_PLAN: {rate: _used(_planned(f"{SMALL_PLAN} --link {rate}")) for rate in rates},
    }


def probed() -> Answer:
    """What does the probe advise two replicas, by synchronisation / computation of a stock
    all-reduce?"""
    answers = {}
    for replicas, nodes in {"each rank": 1, "two nodes": 2}.items():
        answers[replicas] = {}
        for ratio in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
            coded = {codec: ratio * part for codec, part in _BYTES.items()}
            offers = replicas_of(coded, nodes)
            hashes = {offer.name: offer.strategy.hash() for offer in offers}
            ranking = rank_replicas(offers, 2)
            first, apart = ranking.order[0].option.name, ranking.apart[0]
            answers[replicas][f"{ratio:g}"] = {
                "without loss": [first, hashes.get(str(first))],
                "changes training": [apart.option.name, hashes[str(apart.option.name)]],
                "its break-even": ranking.break_even.get(str(apart.option.name)),
            }
    return answers


QUESTIONS: dict[str, Callable[[], Answer]] = {
    function.__name__: function
    for function in (strategies, link_verdicts, rounds, judged, islands, plans, probed)
}


def path(name: str) -> Path:
    """Return the file of the answers to a question."""
    return FOLDER / f"{name}.json"


def rounded(value: Any) -> Any:
    """Return a JSON value whose floats have six digits; null where one is not finite."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _evidence(experiment: Experiment) -> Evidence:
    """Return what the report of an experiment is made from, as far as a verdict depends on it."""
    params, results = experiment
    baseline, comparison, timings = params("baseline", "comparison", "timings")
    last = [*params("rounds")][-1]
    return make_evidence(
        only(read_results(results / "results.jsonl", "restore it"), TrainResult),
        baseline,
        history=History.from_file(results / "rounds" / last / "history.json", "restore it"),
        timed=only(read_timings(results / "timings", timings), TimingResult),
        turns=turns(timings),
        comparison=comparison,
        tolerance=params.complete().agent_of(last).quality_tolerance,
    )


def _choice(choice: Choice) -> Answer:
    alone = choice.ratio("alone_ratio")
    shown = "faster" if alone.high < 1 else "slower" if alone.low > 1 else "not told apart"
    return {
        "run": choice.name,
        "hash": choice.strategy.hash(),
        "than one device alone": shown if math.isfinite(alone.high) else "unknown",
        "step over one device's": [*alone],
        "step over the baseline's": [*choice.ratio("step_ratio")],
        "perplexity over the baseline's": float(choice.cost["ppl_ratio"]),
    }


def _choice_by_rules(question: Question) -> str | None:
    labels = {candidate.id: candidate.label for candidate in question.candidates}
    choice = choose_by_rules(question).choice
    return None if choice is None else labels[choice]


def _first_history(params: Parameters, results: Path) -> History:
    """Return what the first round of an experiment starts from."""
    records = read_results(results / "results.jsonl", "restore it")
    timed = only(read_timings(results / "timings", params("timings")), TimingResult)
    return initial_history(records, timed, params("agent"), params("train"))


def _proposal(results: Path, number: str) -> Proposal:
    return Proposal.from_file(results / "rounds" / number / "proposal.json", "restore it")


def _planned(arguments: str) -> Answer:
    with redirect_stdout(StringIO()) as output:
        main(["plan", *arguments.split(), "--json"])
    return json.loads(output.getvalue())


def _used(plan: Answer) -> list[str]:
    """Return what a plan names: the best without loss, then what changes training, if faster."""
    return [f"{row['strategy']} on {row['devices']}" for row in plan["best"]]


if __name__ == "__main__":
    for name, ask in QUESTIONS.items():
        text = json.dumps(rounded(ask()), indent=1, ensure_ascii=False)
        # a list is one line
        text = re.sub(r"\[\s[^][{}]*\]", lambda match: " ".join(match[0].split()), text)
        path(name).write_text(text + "\n")
