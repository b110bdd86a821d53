import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from shardlab.core.errors import UserError
from shardlab.search.chat_judge import ChatJudge
from shardlab.search.endpoint import KEY_VARIABLE, PLAIN_HTTP_VARIABLE, Endpoint
from shardlab.search.prompt import Prompt
from tests.search.chat_server import (
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


@pytest.mark.parametrize("refusal", [400, 422, 500])
@pytest.mark.parametrize(
    ("spoken", "tried"),
    [
        ("json_object", ["json_schema", "json_object", "json_object"]),
        ("text", ["json_schema", "json_object", "text", "text"]),
    ],
)
def test_next_dialect_is_tried_and_then_kept(refusal, spoken, tried):
    def rule(request, n):
        return (200, says(WANTED)) if dialect(request) == spoken else (refusal, {"error": "no"})

    verdict, server = asked(rule)
    assert verdict.choice == WANTED
    assert [dialect(request) for request in server.requests] == tried


@pytest.mark.parametrize("status", [429, 502, 503])
def test_request_is_retried_while_the_server_is_busy(status):
    def rule(request, n):
        return (status, {}) if n <= 2 else (200, says(WANTED))

    with serving(rule) as server:
        assert judge(server).choose(question()).choice == WANTED
    assert len(server.requests) == 4


def test_persistent_server_error_is_raised():
    with (
        serving(lambda request, n: (503, {})) as server,
        pytest.raises(UserError, match=r"status 503 after 4 attempts.*agent.judge to rules"),
    ):
        judge(server).choose(question())


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_permanent_http_errors_are_not_retried(status):
    with (
        serving(lambda request, n: (status, {"echo": KEY})) as server,
        pytest.raises(UserError, match=f"status {status}"),
    ):
        judge(server).choose(question())
    assert len(server.requests) == 1


def test_slow_server_is_an_error_of_the_user():
    release = threading.Event()

    def rule(request, n):
        release.wait(20)
        return 200, says(WANTED)

    with serving(rule) as server:
        slow = judge(server, timeout_s=0.05, attempts=2)
        with pytest.raises(UserError, match=r"none within 0.05 s after 2 attempts"):
            slow.choose(question())
        release.set()


OK = b"HTTP/1.1 200 OK\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@contextmanager
def dripping(start: bytes, drop: bytes, pause_s: float) -> Iterator[str]:
    """A server that sends `start` and then `drop` again and again; yields its URL."""

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client gives up, as it should
            connection.recv(1 << 16)
            connection.sendall(start)
            while not ended.wait(pause_s):
                connection.sendall(drop)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[door.accept()[0]], daemon=True).start()

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}/v1"
        ended.set()
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("pause_s", [0, 0.01])
@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"H"),
        (OK + b"X-Header: ", b"x"),
        (b"", INTERIM),
        (INTERIM[:-2] + b"X-Header: ", b"x"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (OK + b"\r\n", b" "),
    ],
    ids=["status", "header", "interim", "interim header", "chunk size", "body"],
)
def test_timeout_covers_the_whole_call(start, drop, pause_s):
    """Each byte comes in time, the answer does not (attack 14 of the review)."""
    with dripping(start, drop, pause_s) as url:
        began = time.monotonic()
        endpoint = Endpoint(url, "a-model", timeout_s=0.1, attempts=2, wait_s=0.001)
        try:
            endpoint.ask(Prompt("", "", ()))
        except UserError as error:
            late, long = "none within 0.1 s after 2 attempts", "no chat completion"
            assert "\n" not in str(error)
            assert late in str(error) or (long in str(error) and not pause_s)
        assert time.monotonic() - began < 10  # the drip has no end


def test_absent_server_is_an_error_of_the_user():
    with serving(lambda request, n: (200, says(WANTED))) as server:
        url = server.url
    gone = ChatJudge(Endpoint(url, "a-model", attempts=2, wait_s=0.001))
    with pytest.raises(UserError, match="ConnectionError after 2 attempts"):
        gone.choose(question())


def test_key_is_sent_and_kept_nowhere(monkeypatch, capsys, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    # the server repeats the key wherever it can
    answer = chat(json.dumps({"reason": f"key {KEY}", "choice": WANTED, KEY: KEY}))
    with serving(lambda request, n: (200, answer)) as server:
        asking = ChatJudge(Endpoint.from_environment(server.url, "a-model"))
        verdict = asking.choose(question())
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert verdict.reason == "key [key]"
    kept = asking.conversation().model_dump_json()
    assert KEY not in "".join(capsys.readouterr()) + caplog.text + kept
    assert kept.count("[key]") == 6


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_key_is_in_no_error(status):
    with (
        serving(lambda request, n: (status, {"error": f"bad key {KEY}"})) as server,
        pytest.raises(UserError) as error,
    ):
        judge(server).choose(question())
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
        judge(server, key=None).choose(question())
    assert server.keys == [None, None]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:80/v1",
        "file:///etc/passwd",
        "http://me:pw@host/v1",
        "https://host/v1?key=pw",
    ],
)
def test_invalid_endpoint_url_is_refused(url):
    with pytest.raises(UserError, match=r"agent\.endpoint") as error:
        Endpoint(url, "a-model")
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("host", ["api..example.com", f"{'a' * 64}.example"])
def test_a_mistyped_host_is_an_error_of_the_user(host):
    with pytest.raises(UserError) as error:
        Endpoint(f"http://{host}/v1", "a-model", attempts=1).ask(Prompt("", "", ()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["judge.example", "10.0.0.7", "127.0.0.1.example", "[fd00::7]"])
def test_key_is_not_sent_to_other_hosts_in_plain_text(monkeypatch, host):
    """Unless that very host is allowed by its name (attack 14 of the review)."""
    url, name = f"http://{host}:80/v1", host.strip("[]")
    monkeypatch.setenv(PLAIN_HTTP_VARIABLE, "another.example")
    with pytest.raises(UserError) as error:
        Endpoint(url, "a-model", KEY)
    assert f"{PLAIN_HTTP_VARIABLE}={name}" in str(error.value)
    assert KEY not in str(error.value) and "\n" not in str(error.value)
    Endpoint(url, "a-model")
    Endpoint(url.replace("http:", "https:"), "a-model", KEY)
    monkeypatch.setenv(PLAIN_HTTP_VARIABLE, name)
    Endpoint(url, "a-model", KEY)


@pytest.mark.parametrize("host", ["localhost", "127.1.2.3", "[::1]"])
def test_key_may_be_sent_to_this_machine(host):
    Endpoint(f"http://{host}/v1", "a-model", KEY)


def test_key_for_this_machine_reaches_no_proxy(monkeypatch):
    with serving(lambda request, n: (200, says(WANTED))) as server:
        with serving(lambda request, n: (200, says(WANTED))) as proxy:
            for name in ("http_proxy", "all_proxy"):
                monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
            judge(server).choose(question())
        assert (server.keys, proxy.keys) == ([f"Bearer {KEY}"] * 2, [])
