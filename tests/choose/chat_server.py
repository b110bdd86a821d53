"""A real server on this machine that answers like a language model, and the judge that asks it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shardlab.choose.chat import Endpoint
from shardlab.choose.judge import Judge, choose_by_model

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
                    if status in (429, 503):
                        self.send_header("Retry-After", "20000")  # nobody waits so long
                    if status == 301:
                        self.send_header("Location", "/elsewhere")
                    self.end_headers()
                    self.wfile.write(data)
                except ConnectionError:
                    pass  # the client gave up, as some tests want

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


def chat(content: Any, finish: str = "stop") -> Any:
    message = {"role": "assistant", "content": content}
    return {"choices": [{"message": message, "finish_reason": finish}]}


def listed(request: Request) -> list[str]:
    """Return the ids of the candidates in the order of the prompt."""
    lines = request["messages"][-1]["content"].splitlines()
    return [line[2:].partition(":")[0] for line in lines if line.startswith("- ")]


def judge(server: Server, answers: Path, **options: float) -> Judge:
    return model_judge(server.url, answers, **options)


def model_judge(url: str, answers: Path, model: str = "a-model", **options: float) -> Judge:
    settings: Any = {"timeout_s": 60, "max_tokens": 200, "pause_s": 0.001, **options}
    endpoint = Endpoint(url, model, **settings)
    return lambda question: choose_by_model(question, endpoint, answers)
