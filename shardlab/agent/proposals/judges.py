"""The judge that the parameters name."""

from pathlib import Path

from shardlab.agent.proposals.chat import Chat, Replay
from shardlab.agent.proposals.chat_judge import ChatJudge
from shardlab.agent.proposals.endpoint import Endpoint
from shardlab.agent.proposals.judge import Judge, RuleJudge
from shardlab.agent.proposals.local_model import LocalModel
from shardlab.agent.proposals.supervision import SupervisedJudge
from shardlab.experiment.search import Agent


def judge_of(agent: Agent) -> Judge:
    """Return the judge of a round; a language model is supervised."""
    model = model_of(agent)
    return SupervisedJudge(model) if model else RuleJudge()


def model_of(agent: Agent) -> ChatJudge | None:
    """Return the language model that judges; None for rules."""
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
