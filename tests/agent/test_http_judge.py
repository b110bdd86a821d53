import pytest

from shardlab.agent.proposals.endpoint import Endpoint
from shardlab.agent.proposals.http_judge import HttpJudge, InvalidAnswerError, read_choice
from shardlab.core.errors import UserError
from shardlab.strategy.codec_table import built_in
from shardlab.strategy.compression import Compression, WeightCompression
from shardlab.strategy.settings import Override
from shardlab.strategy.strategy import Strategy
from tests.agent.chat_server import (
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
from tests.agent.searches import ask


def test_same_choice_in_both_orders_is_the_verdict(tmp_path):
    verdict, server = asked(tmp_path, says(WANTED))
    assert (verdict.choice, verdict.judge) == (WANTED, "http: a-model")
    assert verdict.reason == "exposed communication is 31 %"
    assert [listed(request) for request in server.requests] == [IDS, IDS[::-1]]
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}


def test_only_offered_ids_and_abstention_are_in_the_schema(tmp_path):
    _, server = asked(tmp_path, says(WANTED))
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == [*IDS, "abstain"]


def test_prompt_explains_every_setting_and_codec(tmp_path):
    _, server = asked(tmp_path, says(WANTED))
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


def test_candidates_are_told_by_one_template_without_their_origin(tmp_path):
    _, server = asked(tmp_path, says(WANTED))
    lines = server.requests[0]["messages"][-1]["content"].splitlines()
    told = {line[2:10]: line[12:] for line in lines if line.startswith("- ")}
    assert told[WANTED].startswith("fsdp2, none, kept after forward (reshard_after_forward: true")
    assert all(
        "; predicted: step 40.00 ms (95 % 36.50 to 43.50), peak" in each for each in told.values()
    )
    assert not any(each.why in line for each in CANDIDATES for line in lines)


def test_position_bias_is_an_abstention(tmp_path):
    verdict, _ = asked(tmp_path, lambda request, n: (200, says(listed(request)[0])))
    assert verdict.choice is None
    assert IDS[0] in verdict.reason and IDS[-1] in verdict.reason


def test_abstention_of_the_model_is_kept(tmp_path):
    verdict, _ = asked(tmp_path, says("abstain", "too close"))
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
        chat(None),
        {"choices": []},
        {"error": "none of your business"},
        b"<html>not JSON</html>",
        b"",
        b"[" * 90_000,
        b"x" * 200_000,
    ],
)
def test_invalid_answer_is_an_abstention(tmp_path, body):
    verdict, _ = asked(tmp_path, body)
    assert verdict.choice is None
    assert verdict.reason.startswith("abstains: ")


@pytest.mark.parametrize(
    "text",
    [
        f'\ud800 {{"choice": "{WANTED}"}}',  # a lone surrogate
        f'Sure {{ so:\n```json\n{{"reason": "r", "choice": "{WANTED}"}}\n```',
    ],
)
def test_choice_is_found_inside_of_other_text(tmp_path, text):
    assert asked(tmp_path, chat(text))[0].choice == WANTED


def test_reason_is_one_printable_line_of_bounded_length(tmp_path):
    reason = "line one\nline two\x1b[31m\ud800 " + "x" * 9000
    verdict, _ = asked(tmp_path, says(WANTED, reason[:3000]))
    assert verdict.choice == WANTED
    assert len(verdict.reason) <= 500
    assert verdict.reason.isprintable()


def test_answers_are_replayed_without_a_server(tmp_path):
    first, _ = asked(tmp_path, says(WANTED))
    assert len(list(tmp_path.glob("*.json"))) == 2
    elsewhere = Endpoint("http://127.0.0.1:9/v1", "a-model", attempts=1)
    assert HttpJudge(elsewhere, tmp_path).choose(question()) == first


def test_invalid_answers_are_replayed_too(tmp_path):
    with serving(lambda request, n: (200, b"nonsense")) as server:
        first = judge(server, tmp_path).choose(question())
        assert judge(server, tmp_path).choose(question()) == first
    assert len(server.requests) == 1


def test_other_questions_and_models_are_asked_separately(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path).choose(question())
        judge(server, tmp_path).choose(ask(*CANDIDATES[:2]))
        HttpJudge(Endpoint(server.url, "b-model"), tmp_path).choose(question())
    assert len(server.requests) == 6


def test_question_answered_in_one_order_resumes_with_the_other(tmp_path):
    with (
        serving(lambda request, n: (200, says(WANTED)) if n == 1 else (503, {})) as server,
        pytest.raises(UserError),
    ):
        judge(server, tmp_path, attempts=1).choose(question())
    verdict, server = asked(tmp_path, says(WANTED))
    assert (verdict.choice, len(server.requests)) == (WANTED, 1)


def test_damaged_answer_is_named(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path).choose(question())
        for path in tmp_path.glob("*.json"):
            path.write_text("{")
        with pytest.raises(UserError, match=r"json: damaged.*delete it"):
            judge(server, tmp_path).choose(question())


def test_nested_choices_do_not_count():
    with pytest.raises(InvalidAnswerError):
        read_choice(f'{{"a": {{"choice": "{WANTED}"}}}}', IDS)
