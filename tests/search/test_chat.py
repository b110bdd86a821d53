"""Conversations that were kept answer again, without a server."""

import pytest

from shardlab.core.errors import UserError
from shardlab.search.chat import Replay
from shardlab.search.chat_judge import ChatJudge
from shardlab.search.supervision import SupervisedJudge
from tests.search.chat_server import (
    CANDIDATES,
    WANTED,
    judge,
    listed,
    question,
    reader,
    says,
    serving,
)
from tests.search.searches import ask


def test_a_kept_conversation_gives_the_same_verdict_and_is_kept_again(tmp_path):
    path = tmp_path / "conversation.json"
    with serving(reader) as server:
        asking = SupervisedJudge(judge(server))
        verdict = asking.choose(question())
    asking.conversation().to_file(path)
    assert (verdict.judge, verdict.prompts) == ("http: a-model", 12)
    replayed = SupervisedJudge(ChatJudge(Replay(tmp_path)))
    assert replayed.choose(question()) == verdict.model_copy(update={"judge": "replay"})
    assert replayed.conversation().exchanges == asking.conversation().exchanges


def test_an_equal_prompt_is_sent_once():
    """A server may answer it otherwise the next time; a judge may not."""
    with serving(lambda request, n: (200, says(sorted(listed(request))[n % 2]))) as server:
        asking = judge(server)
        first, second = (asking.choose(question()) for _ in range(2))
    assert first == second
    assert asking.prompts == len(server.requests) == len(asking.conversation().exchanges) == 2


def test_several_conversations_answer_unless_they_contradict_each_other(tmp_path):
    questions = question(), ask(*CANDIDATES[:2])
    for number, each in enumerate(questions):
        with serving(lambda request, n: (200, says(min(listed(request))))) as server:
            asking = judge(server)
            asking.choose(each)
        asking.conversation().to_file(tmp_path / f"{number}.json")
    replayed = ChatJudge(Replay(tmp_path))
    assert [replayed.choose(each).choice for each in questions] == [
        min(candidate.id for candidate in each.candidates) for each in questions
    ]
    with serving(lambda request, n: (200, says(max(listed(request))))) as server:
        asking = judge(server)
        asking.choose(question())
    asking.conversation().to_file(tmp_path / "other.json")
    with pytest.raises(UserError, match=r"other.json: answers otherwise than .*0.json: remove"):
        Replay(tmp_path)


def test_other_prompts_have_no_kept_answer(tmp_path):
    path = tmp_path / "conversation.json"
    with serving(lambda request, n: (200, says(WANTED))) as server:
        asking = judge(server)
        asking.choose(question())
    asking.conversation().to_file(path)
    for other in (ask(*CANDIDATES[:2]), ask(*CANDIDATES, held=CANDIDATES[0])):
        with pytest.raises(UserError, match=r"holds no answer to prompt \w{8} .*: copy"):
            ChatJudge(Replay(tmp_path)).choose(other)


def test_a_damaged_conversation_is_refused_and_an_empty_folder_answers_nothing(tmp_path):
    verdict = SupervisedJudge(ChatJudge(Replay(tmp_path))).choose(question())
    assert verdict.judge == "rules"
    assert verdict.reason.startswith(
        f"replay gave no answer ({tmp_path}: holds no answer to prompt "
    )
    (tmp_path / "conversation.json").write_text("{")
    with pytest.raises(UserError, match=r"conversation.json: damaged.*git checkout"):
        Replay(tmp_path)
