import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardlab.agent.proposals.endpoint import KEY_VARIABLE, Endpoint
from shardlab.agent.proposals.http_judge import HttpJudge
from shardlab.core.errors import UserError
from tests.agent.chat_server import (
    KEY,
    WANTED,
    asked,
    chat,
    dialect,
    judge,
    question,
    says,
    serving,
)


def everything_in(folder) -> str:
    return "".join(path.name + path.read_text() for path in folder.rglob("*") if path.is_file())


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

    verdict, server = asked(tmp_path, rule)
    assert verdict.choice == WANTED
    assert [dialect(request) for request in server.requests] == tried


@pytest.mark.parametrize("status", [429, 502, 503])
def test_request_is_retried_while_the_server_is_busy(tmp_path, status):
    def rule(request, n):
        return (status, {}) if n <= 2 else (200, says(WANTED))

    with serving(rule) as server:
        assert judge(server, tmp_path).choose(question()).choice == WANTED
    assert len(server.requests) == 4


def test_persistent_server_error_is_raised_and_nothing_is_stored(tmp_path):
    with (
        serving(lambda request, n: (503, {})) as server,
        pytest.raises(UserError, match=r"status 503 after 4 attempts.*agent.judge to rules"),
    ):
        judge(server, tmp_path).choose(question())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_permanent_http_errors_are_not_retried(tmp_path, status):
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


def test_timeout_covers_the_whole_reply(tmp_path):
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
def test_invalid_key_is_refused_without_printing_it(key):
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
def test_invalid_endpoint_url_is_refused(url):
    with pytest.raises(UserError, match=r"agent\.endpoint") as error:
        Endpoint(url, "a-model")
    assert "pw" not in str(error.value)
