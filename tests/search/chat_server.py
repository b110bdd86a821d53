"""A real server on this machine that answers like a language model, and the judge that asks it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shardlab.search.chat_judge import ChatJudge
from shardlab.search.endpoint import Endpoint
from shardlab.search.rounds import Verdict
from tests.record_factory import make_candidate
from tests.search.searches import ask

KEY = "sk-very-secret-0123456789"
CANDIDATES = [
    make_candidate(wrap="root"),
    make_candidate(reshard_after_forward=False),
    make_candidate(gradients={"codec": "int8:group=512"}),
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


def reader(request: Request, _number: int) -> Reply:
    """A rule as of a model that can read: the shortest step, or none where all take 100 ms."""
    steps = {}
    for line in request["messages"][-1]["content"].splitlines():
        if line.startswith("- ") and "predicted: step unknown" not in line:
            steps[line[2:10]] = float(line.partition("predicted: step ")[2].split()[0])
    best = min(steps, key=lambda each: (steps[each], each))
    return 200, says(best if steps[best] < 100 else "abstain")


def judge(server: Server, key: str | None = KEY, **options: Any) -> ChatJudge:
    options = {"timeout_s": 60, "wait_s": 0.001, **options}
    return ChatJudge(Endpoint(server.url, "a-model", key, **options))


def question():
    return ask(*CANDIDATES)


def asked(reply: Any, **options: Any) -> tuple[Verdict, Server]:
    """Return the verdict of a judge, and the server that it asked.

    Args:
        reply: a rule as of `Server`, or the body of every answer.
    """
    with serving(reply if callable(reply) else lambda request, n: (200, reply)) as server:
        return judge(server, **options).choose(question()), server
