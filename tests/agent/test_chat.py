"""Conversations that were kept answer again, without a server."""

import pytest

from shardlab.agent.proposals.chat import Replay
from shardlab.agent.proposals.chat_judge import ChatJudge
from shardlab.agent.proposals.supervision import SupervisedJudge
from shardlab.core.errors import UserError
from tests.agent.chat_server import CANDIDATES, WANTED, judge, question, reader, says, serving
from tests.agent.searches import ask


def test_a_kept_conversation_gives_the_same_verdict_and_is_not_changed(tmp_path):
    path = tmp_path / "conversation.json"
    with serving(reader) as server:
        asking = SupervisedJudge(judge(server))
        verdict = asking.choose(question())
    asking.conversation().to_file(path)
    before = path.read_bytes()
    assert (verdict.judge, verdict.prompts) == ("http: a-model", 12)
    replayed = SupervisedJudge(ChatJudge(Replay(path)))
    assert replayed.choose(question()) == verdict.model_copy(update={"judge": "replay"})
    replayed.conversation().to_file(path)
    assert path.read_bytes() == before


def test_other_prompts_have_no_kept_answer(tmp_path):
    path = tmp_path / "conversation.json"
    with serving(lambda request, n: (200, says(WANTED))) as server:
        asking = judge(server)
        asking.choose(question())
    asking.conversation().to_file(path)
    for other in (ask(*CANDIDATES[:2]), ask(*CANDIDATES, held=CANDIDATES[0])):
        with pytest.raises(UserError, match=r"conversation.json: holds no answer to prompt \w{8} "):
            ChatJudge(Replay(path)).choose(other)


def test_a_damaged_conversation_is_refused_and_a_missing_one_answers_nothing(tmp_path):
    path = tmp_path / "conversation.json"
    verdict = SupervisedJudge(ChatJudge(Replay(path))).choose(question())
    assert verdict.judge == "rules"
    assert verdict.reason.startswith(f"replay gave no answer ({path}: holds no answer to prompt ")
    path.write_text("{")
    with pytest.raises(UserError, match=r"conversation.json: damaged.*git checkout"):
        Replay(path)
