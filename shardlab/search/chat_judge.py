"""A language model as judge: it picks one of the offered ids, and is asked in both orders.

Models favour places in a list. So each question is asked with the candidates in one order and in
the reverse of it; only a choice that both answers agree on counts (Zheng et al. 2023, "Judging
LLM-as-a-judge", section 3.4). Nothing of an answer but the choice is used, and the reason shown.
"""

import json
from collections.abc import Sequence
from typing import Any

from shardlab.search.chat import Chat
from shardlab.search.conversation import Conversation
from shardlab.search.judge import Judge, Question
from shardlab.search.prompt import ABSTAIN, Prompt
from shardlab.search.rounds import Candidate, Verdict

_LONGEST_REASON = 500


class InvalidAnswerError(ValueError):
    """Answer without a valid choice; the message holds none of its text."""


class ChatJudge(Judge):
    """Judge that asks a language model; disagreement between orders, or an answer that is invalid
    twice, is an abstention."""

    def __init__(self, chat: Chat) -> None:
        self.name = chat.name
        self._chat = chat
        self._answers: dict[Prompt, str] = {}

    def choose(self, question: Question) -> Verdict:
        """Return the verdict; raise `UserError` when the model gives no answer."""
        forward = sorted(question.candidates, key=lambda candidate: candidate.id)
        try:
            choice, reason = self._answer(question, forward)
            reverse_choice, _ = self._answer(question, forward[::-1])
        except InvalidAnswerError as error:
            return self._verdict(None, f"abstains: {error}", "answer")
        if choice != reverse_choice:
            return self._verdict(
                None,
                f"abstains: {choice} in one order of the candidates, "
                f"{reverse_choice} in the reverse order",
                "order",
            )
        return self._verdict(None if choice == ABSTAIN else choice, reason)

    def conversation(self) -> Conversation:  # noqa: D102
        return self._chat.conversation([*self._answers.items()])

    def _answer(self, question: Question, candidates: list[Candidate]) -> tuple[str, str]:
        prompt = Prompt.of(question, candidates)
        try:
            return read_choice(self._ask(prompt), prompt.ids)
        except InvalidAnswerError as error:
            return read_choice(self._ask(prompt.after(str(error))), prompt.ids)

    def _ask(self, prompt: Prompt) -> str:
        # servers answer equal prompts differently, even at temperature 0
        if prompt not in self._answers:
            self.prompts += 1
            self._answers[prompt] = self._chat.ask(prompt)
        return self._answers[prompt]


def read_choice(answer: str, offered: Sequence[str]) -> tuple[str, str]:
    """Parse choice and reason of an answer, which may wrap its JSON object in other text.

    Raises:
        InvalidAnswerError: no choice, several that differ, or an id that was not offered.
    """
    verdicts = [each for each in _objects(answer) if isinstance(each.get("choice"), str)]
    choices = {each["choice"] for each in verdicts}
    if len(choices) != 1:
        raise InvalidAnswerError(f"the answer holds {len(choices)} choices instead of one")
    choice = choices.pop()
    if choice != ABSTAIN and choice not in offered:
        raise InvalidAnswerError("the answer names an id that was not offered")
    return choice, _tame(verdicts[0].get("reason"))


def _objects(text: str) -> list[dict[str, Any]]:
    """Yield the outermost JSON objects in a text."""
    decoder, found, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found.append(value)
        start = text.find("{", end)
    return found


def _tame(reason: Any) -> str:
    """Return one printable line of bounded length."""
    if not isinstance(reason, str):
        return "gave no reason"
    line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return line[:_LONGEST_REASON] or "gave no reason"
