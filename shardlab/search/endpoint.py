"""Client of OpenAI-compatible `/chat/completions`, for servers with different capabilities.

Servers disagree about constrained output: some follow `json_schema`, some answer it with 400, 422
or 500, some ignore it with 200. So the dialects are tried from the strictest to plain text, and
an answer is validated whatever the dialect.
"""

import json
import os
import time
from concurrent.futures import Future
from ipaddress import ip_address
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import requests

from shardlab.core.errors import UserError
from shardlab.search.chat import Chat
from shardlab.search.prompt import Prompt

KEY_VARIABLE = "SHARDLAB_API_KEY"
PLAIN_HTTP_VARIABLE = "SHARDLAB_PLAIN_HTTP"
"""names the one host, other than this machine, that may be sent a key without encryption"""

_LARGEST_BODY = 100_000
_LARGEST_ANSWER = 8_000
_LONGEST_WAIT_S = 30.0
_ANSWER_TOKENS = 1000
_REFUSED_DIALECT = (400, 422, 500)
_LATE = (requests.Timeout, TimeoutError)
_AWAY = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
"""errors that may be transient, as those of `_LATE`"""

_Reply = tuple[int, float | None, bytes | None]
"""status, requested wait and body"""
DIALECTS = ("json_schema", "json_object", "text")


class Endpoint(Chat):
    """Client for one model at one endpoint.

    The key is sent in the Authorization header and goes nowhere else: no text of an error holds
    it, an answer that repeats it has it cut out, and redirects are not followed. Without encryption
    it is sent to this machine alone, and to the host that `SHARDLAB_PLAIN_HTTP` names.

    Args:
        url: base URL, ending in /v1.
        model: the model's name there.
        key: or None for a server that wants none.
        timeout_s: longest duration of one call, from the look-up of the name to the last byte.
        attempts: how often one question is sent while the server is busy or unreachable.
        wait_s: pause after the first failed attempt; doubles each time, unless the server says how
            long to wait; never above 30 s.

    Raises:
        UserError: the URL or the key cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None = None,
        timeout_s: float = 120,
        attempts: int = 4,
        wait_s: float = 1,
    ) -> None:
        parts = urlsplit(url)
        bare = "@" not in parts.netloc and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or not bare:
            raise UserError(
                "agent.endpoint: expected http(s)://HOST/v1 without a name, password or query; "
                f"a key goes into {KEY_VARIABLE}"
            )
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise UserError(f"{KEY_VARIABLE}: holds characters that no key has; set it again")
        self._local = _is_local(parts.hostname)
        allowed = self._local or parts.hostname == os.environ.get(PLAIN_HTTP_VARIABLE)
        if key is not None and parts.scheme == "http" and not allowed:
            raise UserError(
                f"agent.endpoint: {KEY_VARIABLE} would go to {parts.hostname} in plain text: use "
                f"https, or allow it with {PLAIN_HTTP_VARIABLE}={parts.hostname}"
            )
        self.name = f"http: {model}"
        self.model: str = model
        self.endpoint = url
        self._url = url.rstrip("/") + "/chat/completions"
        self._host = parts.netloc
        self._key = key
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._wait_s = wait_s
        self._untried = [*DIALECTS]
        self.dialect: str = self._untried.pop(0)

    @classmethod
    def from_environment(cls, url: str, model: str) -> "Endpoint":
        """Return a client with the key of `SHARDLAB_API_KEY`, where that is set."""
        return cls(url, model, os.environ.get(KEY_VARIABLE, "").strip() or None)

    def ask(self, prompt: Prompt) -> str:
        """Return the text of the answer.

        Raises:
            UserError: no reply after all attempts, or one that asking again cannot fix.
        """
        trouble = ""
        for attempt in range(self._attempts):
            try:
                status, wait, body = self._reply(prompt)
            except _LATE:
                trouble, wait = f"none within {self._timeout_s:g} s", None
            except _AWAY as error:
                trouble, wait = type(error).__name__, None
            except (requests.RequestException, ValueError) as error:  # the latter of its address
                raise self._failure(type(error).__name__) from None
            else:
                if status == 200:
                    return self._content(body)
                trouble = f"status {status}"
                if status != 429 and status < 500:
                    raise self._failure(trouble)
            if attempt + 1 < self._attempts:
                pause = self._wait_s * 2**attempt if wait is None else wait
                time.sleep(min(pause, _LONGEST_WAIT_S))
        raise self._failure(f"{trouble} after {self._attempts} attempts")

    def _reply(self, prompt: Prompt) -> _Reply:
        """Return the reply in the first dialect that the server accepts."""
        while True:
            answer = self._post_in_time(_payload(self.dialect, self.model, prompt))
            if answer[0] not in _REFUSED_DIALECT or not self._untried:
                return answer
            self.dialect = self._untried.pop(0)

    def _post_in_time(self, payload: dict[str, Any]) -> _Reply:
        """Return the reply, or raise `TimeoutError` at the deadline.

        The time-out of a socket restarts with every byte of a header or an interim response, and
        none covers the look-up of a name. So a thread makes the call; one that is late is left
        behind and ends with this process at the latest.
        """
        reply: Future[_Reply] = Future()

        def post() -> None:
            try:
                reply.set_result(self._post(payload))
            except BaseException as error:
                reply.set_exception(error)

        Thread(target=post, daemon=True).start()
        return reply.result(self._timeout_s)

    def _post(self, payload: dict[str, Any]) -> _Reply:
        deadline = time.monotonic() + self._timeout_s
        with requests.post(
            self._url,
            json=payload,
            auth=self._authorize,
            timeout=self._timeout_s,
            allow_redirects=False,
            stream=True,
            # a proxy of the environment would get the key that is meant for this machine
            proxies={"no_proxy": "*"} if self._local else None,
        ) as response:
            wait = _seconds(response.headers.get("Retry-After"))
            if response.status_code != 200:
                return response.status_code, wait, None
            return 200, wait, _body(response, deadline)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # as an `auth` it also keeps requests from sending a password of ~/.netrc
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _content(self, body: bytes | None) -> str:
        try:
            content = json.loads(body or b"")["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise self._failure("its reply is no chat completion")
        if self._key:
            content = content.replace(self._key, "[key]")
        # JSON permits half of a surrogate pair, which no file can hold
        return content.encode(errors="replace").decode()[:_LARGEST_ANSWER]

    def _failure(self, trouble: str) -> UserError:
        hint = f"check {KEY_VARIABLE}" if trouble in ("status 401", "status 403") else "check it"
        return UserError(
            f"agent.endpoint: {self._host} gave no answer ({trouble}); {hint}, "
            "or set agent.judge to rules"
        )


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _payload(dialect: str, model: str, prompt: Prompt) -> dict[str, Any]:
    """Return the request body; the plain dialect holds only what every server knows."""
    plain: dict[str, Any] = {"model": model, "messages": prompt.messages}
    if dialect == "text":
        return plain
    shape: dict[str, Any] = {"type": "json_object", "schema": prompt.schema}
    if dialect == "json_schema":
        named = {"name": "verdict", "strict": True, "schema": prompt.schema}
        shape = {"type": "json_schema", "json_schema": named}
    return {
        **plain,
        "temperature": 0,
        "seed": 0,
        "max_tokens": _ANSWER_TOKENS,
        "response_format": shape,
    }


def _body(response: requests.Response, deadline: float) -> bytes | None:
    """Read the reply, or return None when it is too long; stops shortly after the deadline."""
    body = bytearray()
    # byte by byte, because a longer read would apply the timeout to each byte
    for part in response.iter_content(1):
        body += part
        if len(body) > _LARGEST_BODY:
            return None
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    return bytes(body)


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; dates are ignored."""
    return float(header) if header and header.isascii() and header.isdigit() else None
