import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shardlab.agent.endpoint import KEY_VARIABLE, Endpoint
from shardlab.agent.http_judge import HttpJudge, InvalidAnswerError, read_choice
from shardlab.core.errors import UserError
from tests.agent.searches import ask, begin, candidate

KEY = "sk-very-secret-0123456789"
CANDIDATES = [
    candidate(wrap="root"),
    candidate(reshard_after_forward=False),
    candidate(gradients={"codec": "int8:group=512"}),
]
WANTED = CANDIDATES[1].id
IDS = sorted(each.id for each in CANDIDATES)

Request = dict[str, Any]
Reply = tuple[int, Any]
"""status, and a JSON value or raw bytes"""


class Server:
    """An OpenAI-compatible endpoint that answers by `rule(request, number of the request)`."""

    def __init__(self, rule: Callable[[Request, int], Reply]) -> None:
        self.requests: list[Request] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **body})
                outer.keys.append(self.headers["Authorization"])
                status, answer = rule(body, len(outer.requests))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    if status == 429:
                        self.send_header("Retry-After", "0")
                    if status == 301:
                        self.send_header("Location", "/elsewhere")
                    self.end_headers()
                    self.wfile.write(data)
                except ConnectionError:
                    assert status == 200  # the client gave up, as some tests want

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(rule: Callable[[Request, int], Reply]) -> Iterator[Server]:
    server = Server(rule)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def says(choice: str, reason: str = "exposed communication is 31 %") -> Any:
    return chat(json.dumps({"reason": reason, "choice": choice}))


def chat(content: Any) -> Any:
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def dialect(request: Request) -> str:
    return request.get("response_format", {}).get("type", "text")


def listed(request: Request) -> list[str]:
    lines = request["messages"][-1]["content"].splitlines()
    return [line[2:].partition(":")[0] for line in lines if line.startswith("- ")]


def judge(server: Server, store, key: str | None = KEY, **options: Any) -> HttpJudge:
    options = {"timeout_s": 5, "wait_s": 0.001, **options}
    return HttpJudge(Endpoint(server.url, "a-model", key, **options), store)


def question():
    return ask(begin(), *CANDIDATES)


def everything_in(folder) -> str:
    return "".join(path.name + path.read_text() for path in folder.rglob("*") if path.is_file())


def test_same_choice_in_both_orders_is_the_verdict(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        verdict = judge(server, tmp_path).choose(question())
    assert (verdict.choice, verdict.judge) == (WANTED, "http: a-model")
    assert verdict.reason == "exposed communication is 31 %"
    assert [listed(request) for request in server.requests] == [IDS, IDS[::-1]]
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}


def test_only_offered_ids_and_abstention_are_in_the_schema(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path).choose(question())
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == [*IDS, "abstain"]


def test_judge_that_always_takes_the_first_abstains(tmp_path):
    with serving(lambda request, n: (200, says(listed(request)[0]))) as server:
        verdict = judge(server, tmp_path).choose(question())
    assert verdict.choice is None
    assert IDS[0] in verdict.reason and IDS[-1] in verdict.reason


def test_abstention_of_the_model_is_one(tmp_path):
    with serving(lambda request, n: (200, says("abstain", "too close"))) as server:
        verdict = judge(server, tmp_path).choose(question())
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
    with serving(lambda request, n: (200, body)) as server:
        verdict = judge(server, tmp_path).choose(question())
    assert verdict.choice is None
    assert verdict.reason.startswith("abstains: ")


def test_half_a_surrogate_pair_can_be_kept(tmp_path):
    answer = chat(f'\ud800 {{"choice": "{WANTED}"}}')
    with serving(lambda request, n: (200, answer)) as server:
        assert judge(server, tmp_path).choose(question()).choice == WANTED


def test_text_of_the_model_is_tamed(tmp_path):
    reason = "line one\nline two\x1b[31m\ud800 " + "x" * 9000
    with serving(lambda request, n: (200, says(WANTED, reason[:3000]))) as server:
        verdict = judge(server, tmp_path).choose(question())
    assert verdict.choice == WANTED
    assert len(verdict.reason) <= 500
    assert verdict.reason.isprintable()


@pytest.mark.parametrize("refusal", [400, 422, 500])
@pytest.mark.parametrize(
    ("spoken", "tried"),
    [
        ("json_object", ["json_schema", "json_object", "json_object"]),
        ("text", ["json_schema", "json_object", "text", "text"]),
    ],
)
def test_next_dialect_is_tried_and_then_kept(tmp_path, refusal, spoken, tried):
    def rule(request, n):
        return (200, says(WANTED)) if dialect(request) == spoken else (refusal, {"error": "no"})

    with serving(rule) as server:
        verdict = judge(server, tmp_path).choose(question())
    assert verdict.choice == WANTED
    assert [dialect(request) for request in server.requests] == tried


def test_object_inside_of_text_is_found(tmp_path):
    answer = chat(f'Sure {{ so:\n```json\n{{"reason": "r", "choice": "{WANTED}"}}\n```')
    with serving(lambda request, n: (200, answer)) as server:
        assert judge(server, tmp_path).choose(question()).choice == WANTED


@pytest.mark.parametrize("status", [429, 502, 503])
def test_busy_server_is_asked_again(tmp_path, status):
    def rule(request, n):
        return (status, {}) if n <= 2 else (200, says(WANTED))

    with serving(rule) as server:
        assert judge(server, tmp_path).choose(question()).choice == WANTED
    assert len(server.requests) == 4


def test_server_that_stays_broken_is_an_error_and_nothing_is_kept(tmp_path):
    with (
        serving(lambda request, n: (503, {})) as server,
        pytest.raises(UserError, match=r"status 503 after 4 attempts.*agent.judge to rules"),
    ):
        judge(server, tmp_path).choose(question())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_asking_again_cannot_mend_is_asked_once(tmp_path, status):
    with (
        serving(lambda request, n: (status, {"echo": KEY})) as server,
        pytest.raises(UserError, match=f"status {status}"),
    ):
        judge(server, tmp_path).choose(question())
    assert len(server.requests) == 1


def test_slow_server_is_an_error_of_the_user(tmp_path):
    release = threading.Event()

    def rule(request, n):
        release.wait(20)
        return 200, says(WANTED)

    with serving(rule) as server:
        slow = judge(server, tmp_path, timeout_s=0.05, attempts=2)
        with pytest.raises(UserError, match="Timeout after 2 attempts"):
            slow.choose(question())
        release.set()


def test_dripping_server_does_not_hold_the_stage(tmp_path):
    """Each byte comes in time, the answer does not."""

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(2000):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.01)
            except ConnectionError:
                return  # the client gave up, as it should

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with pytest.raises(UserError, match="TimeoutError after 1 attempts"):
        Endpoint(url, "a-model", timeout_s=0.1, attempts=1).complete([], {})
    server.shutdown()
    server.server_close()


def test_absent_server_is_an_error_of_the_user(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        url = server.url
    gone = HttpJudge(Endpoint(url, "a-model", attempts=2, wait_s=0.001), tmp_path)
    with pytest.raises(UserError, match="ConnectionError after 2 attempts"):
        gone.choose(question())


def test_answers_are_replayed_without_a_server(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        first = judge(server, tmp_path).choose(question())
    assert len(list(tmp_path.glob("*.json"))) == 2
    elsewhere = Endpoint("http://127.0.0.1:9/v1", "a-model", attempts=1)
    assert HttpJudge(elsewhere, tmp_path).choose(question()) == first


def test_invalid_answers_are_replayed_as_well(tmp_path):
    with serving(lambda request, n: (200, b"nonsense")) as server:
        first = judge(server, tmp_path).choose(question())
        assert judge(server, tmp_path).choose(question()) == first
    assert len(server.requests) == 1


def test_another_question_or_model_is_asked_anew(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path).choose(question())
        judge(server, tmp_path).choose(ask(begin(), *CANDIDATES[:2]))
        HttpJudge(Endpoint(server.url, "b-model"), tmp_path).choose(question())
    assert len(server.requests) == 6


def test_half_an_order_resumes_where_it_stopped(tmp_path):
    with (
        serving(lambda request, n: (200, says(WANTED)) if n == 1 else (503, {})) as server,
        pytest.raises(UserError),
    ):
        judge(server, tmp_path, attempts=1).choose(question())
    with serving(lambda request, n: (200, says(WANTED))) as server:
        assert judge(server, tmp_path).choose(question()).choice == WANTED
    assert len(server.requests) == 1


def test_damaged_answer_is_named(tmp_path):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path).choose(question())
        for path in tmp_path.glob("*.json"):
            path.write_text("{")
        with pytest.raises(UserError, match=r"not a stored answer.*delete it"):
            judge(server, tmp_path).choose(question())


def test_key_is_sent_and_kept_nowhere(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    # the server repeats the key wherever it can
    answer = chat(json.dumps({"reason": f"key {KEY}", "choice": WANTED, KEY: KEY}))
    with serving(lambda request, n: (200, answer)) as server:
        verdict = HttpJudge(Endpoint.from_environment(server.url, "a-model"), tmp_path).choose(
            question()
        )
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert verdict.reason == "key [key]"
    output = "".join(capsys.readouterr()) + caplog.text + everything_in(tmp_path)
    assert KEY not in output


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_key_is_in_no_error(tmp_path, status):
    with (
        serving(lambda request, n: (status, {"error": f"bad key {KEY}"})) as server,
        pytest.raises(UserError) as error,
    ):
        judge(server, tmp_path).choose(question())
    assert KEY not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_key_that_is_none_is_refused_without_showing_it(key):
    with pytest.raises(UserError, match=KEY_VARIABLE) as error:
        Endpoint("http://localhost/v1", "a-model", key)
    assert key not in str(error.value)


def test_without_a_key_no_header_and_no_password_of_netrc(tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password elses\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with serving(lambda request, n: (200, says(WANTED))) as server:
        judge(server, tmp_path / "store", key=None).choose(question())
    assert server.keys == [None, None]


@pytest.mark.parametrize("url", ["localhost:80/v1", "file:///etc/passwd", "http://me:pw@host/v1"])
def test_endpoint_that_is_no_plain_url_is_refused(url):
    with pytest.raises(UserError, match=r"agent\.endpoint") as error:
        Endpoint(url, "a-model")
    assert "pw" not in str(error.value)


def test_nested_choices_do_not_count():
    with pytest.raises(InvalidAnswerError):
        read_choice(f'{{"a": {{"choice": "{WANTED}"}}}}', IDS)
