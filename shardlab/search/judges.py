"""The judge that the parameters name."""

from pathlib import Path

from shardlab.config.search import Agent
from shardlab.core.errors import UserError
from shardlab.search.chat import Chat, Replay
from shardlab.search.chat_judge import ChatJudge
from shardlab.search.endpoint import Endpoint
from shardlab.search.judge import Judge, Question, RuleJudge
from shardlab.search.local_model import LocalModel
from shardlab.search.rounds import Verdict
from shardlab.search.supervision import SupervisedJudge


class _Absent(Judge):
    """A language model that is not there, of which the error says why."""

    def __init__(self, name: str, error: UserError) -> None:
        self.name, self._error = name, error

    def choose(self, question: Question) -> Verdict:
        raise self._error


def judge_of(agent: Agent) -> Judge:
    """Return the judge of a round; a language model is supervised, also where it is not there."""
    try:
        model: Judge | None = model_of(agent)
    except UserError as error:
        model = _Absent(agent.judge, error)
    return SupervisedJudge(model) if model else RuleJudge()


def model_of(agent: Agent) -> ChatJudge | None:
    """Return the language model that judges; None for rules.

    Raises:
        UserError: its file, folder or address is not what it should be.
    """
    chat: Chat
    if agent.judge == "rules":
        return None
    if agent.judge == "replay":
        assert agent.model, "the parameters demand it with judge: replay"
        chat = Replay(Path(agent.model))
    elif agent.judge == "local":
        assert agent.model, "the parameters demand it with judge: local"
        chat = LocalModel(agent.model)
    else:
        assert agent.endpoint and agent.model, "the parameters demand both with judge: http"
        chat = Endpoint.from_environment(agent.endpoint, agent.model)
    return ChatJudge(chat)
