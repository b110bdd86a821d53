import json

import pytest

from shardlab.config.codec_table import built_in
from shardlab.config.compression import Compression, WeightCompression
from shardlab.config.settings import Override
from shardlab.config.strategy import Strategy
from shardlab.core.errors import UserError
from shardlab.search.chat_judge import InvalidAnswerError, read_choice
from tests.search.chat_server import (
    CANDIDATES,
    IDS,
    WANTED,
    asked,
    chat,
    judge,
    listed,
    question,
    says,
    serving,
)


def test_same_choice_in_both_orders_is_the_verdict():
    verdict, server = asked(says(WANTED))
    assert (verdict.choice, verdict.judge) == (WANTED, "http: a-model")
    assert verdict.reason == "exposed communication is 31 %"
    assert [listed(request) for request in server.requests] == [IDS, IDS[::-1]]
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}


def test_only_offered_ids_and_abstention_are_in_the_schema():
    _, server = asked(says(WANTED))
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == [*IDS, "abstain"]


def test_prompt_explains_every_setting_and_codec():
    _, server = asked(says(WANTED))
    lines = server.requests[0]["messages"][0]["content"].splitlines()
    described = {line.partition(":")[0] for line in lines}
    for document, path in (
        (Strategy, ""),
        (Compression, "gradients."),
        (WeightCompression, "weights."),
        (Override, "overrides[]."),
    ):
        nested = {"gradients", "weights", "overrides"} if document is Strategy else set()
        assert {f"{path}{name}" for name in set(document.model_fields) - nested} <= described
    assert set(built_in()) <= described
    residual = "type in which error feedback stores what was not sent"
    assert f"gradients.residual: fp32, bf16, int8. {residual}" in lines
    assert any(line.startswith("int4: ") and "levels (uniform, nf4)" in line for line in lines)


def test_candidates_are_told_by_one_template_without_their_origin():
    _, server = asked(says(WANTED))
    lines = server.requests[0]["messages"][-1]["content"].splitlines()
    told = {line[2:10]: line[12:] for line in lines if line.startswith("- ")}
    assert told[WANTED].startswith("fsdp2, none, kept after forward (reshard_after_forward: true")
    assert all(
        "; predicted: step 40.00 ms (95 % 36.50 to 43.50), peak" in each for each in told.values()
    )
    assert not any(each.why in line for each in CANDIDATES for line in lines)


def test_position_bias_is_an_abstention():
    verdict, _ = asked(lambda request, n: (200, says(listed(request)[0])))
    assert verdict.choice is None
    assert IDS[0] in verdict.reason and IDS[-1] in verdict.reason


def test_abstention_of_the_model_is_kept():
    verdict, _ = asked(says("abstain", "too close"))
    assert (verdict.choice, verdict.reason) == (None, "too close")


@pytest.mark.parametrize(
    "body",
    [
        says("00000000"),
        says("../../etc/passwd"),
        chat("the second one, I think"),
        chat('{"choice": 7}'),
        chat(f'{{"choice": "{IDS[0]}"}} or {{"choice": "{IDS[1]}"}}'),
        chat('{"reason": "cut off in the mid'),
    ],
)
def test_invalid_answer_is_asked_for_once_more_and_then_an_abstention(body):
    verdict, server = asked(body)
    assert verdict.choice is None
    assert verdict.reason.startswith("abstains: the answer ")
    first, second = (request["messages"][-1]["content"] for request in server.requests)
    assert second.startswith(f"{first}\n\nAn earlier answer was invalid: the answer ")
    assert verdict.prompts == 2


def test_valid_answer_at_the_second_attempt_counts():
    verdict, server = asked(lambda request, n: (200, says(WANTED) if n > 1 else chat("{}")))
    assert (verdict.choice, verdict.prompts, len(server.requests)) == (WANTED, 3, 3)


@pytest.mark.parametrize(
    "body",
    [
        chat(None),
        {"choices": []},
        {"error": "none of your business"},
        b"<html>not JSON</html>",
        b"",
        b"[" * 90_000,
        b"x" * 200_000,
    ],
)
def test_reply_that_is_no_answer_is_an_error_of_one_line(body):
    with pytest.raises(UserError, match="its reply is no chat completion") as error:
        asked(body)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        f'\ud800 {{"choice": "{WANTED}"}}',  # a lone surrogate
        f'Sure {{ so:\n```json\n{{"reason": "r", "choice": "{WANTED}"}}\n```',
    ],
)
def test_choice_is_found_inside_of_other_text(text):
    assert asked(chat(text))[0].choice == WANTED


def test_reason_is_one_printable_line_of_bounded_length():
    reason = "line one\nline two\x1b[31m\ud800 " + "x" * 9000
    verdict, _ = asked(says(WANTED, reason[:3000]))
    assert verdict.choice == WANTED
    assert len(verdict.reason) <= 500
    assert verdict.reason.isprintable()


def test_conversation_holds_what_was_sent_and_received_in_order():
    answers = ["neither", json.dumps({"choice": WANTED}), json.dumps({"choice": WANTED})]
    with serving(lambda request, n: (200, chat(answers[n - 1]))) as server:
        asking = judge(server)
        asking.choose(question())
    kept = asking.conversation()
    assert (kept.judge, kept.model, kept.endpoint) == ("http: a-model", "a-model", server.url)
    assert kept.dialect == "json_schema"
    assert [each.answer for each in kept.exchanges] == answers
    for request, each in zip(server.requests, kept.exchanges, strict=True):
        system, user = request["messages"]
        assert (system["content"], user["content"]) == (kept.system, each.user)
        schema = request["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["choice"]["enum"] == [*each.ids, "abstain"]


def test_nested_choices_do_not_count():
    with pytest.raises(InvalidAnswerError):
        read_choice(f'{{"a": {{"choice": "{WANTED}"}}}}', IDS)
