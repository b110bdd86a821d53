"""The project answers its users today what it answered yesterday.

A user asks which strategy to take. Many modules have a part in the answer, and each may be
rewritten. The files beside this module hold the answers that follow from the committed results.
They may be wrong, but nothing changes them by accident: who changes one on purpose writes them
again by `python -m tests.answers.questions`, and says in the commit message what the answer was,
what it is, and why that is better.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.answers.questions import FOLDER, QUESTIONS, path, rounded
from tests.pipeline.workspace import ROOT


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answers_to_a_question_stay(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stored = json.loads(path(question).read_text())
    changed = [*differences(stored, rounded(QUESTIONS[question]()))]
    assert not changed, "\n".join([f"{QUESTIONS[question].__doc__}", *changed])


def test_every_file_answers_a_question() -> None:
    assert {*FOLDER.glob("*.json")} == {path(question) for question in QUESTIONS}


def differences(stored: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each answer that changed; numbers may differ in the last of six digits."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in {**stored, **now}:
            yield from differences(stored.get(key), now.get(key), f"{place} / {key}")
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for before, after in zip(stored, now, strict=True):
            yield from differences(before, after, place)
    elif isinstance(stored, float) and isinstance(now, float):
        if not math.isclose(stored, now, rel_tol=2e-5):
            yield f"{place.removeprefix(' / ')}: {stored} -> {now}"
    elif stored != now:
        yield f"{place.removeprefix(' / ')}: {stored!r} -> {now!r}"
