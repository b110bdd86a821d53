"""Client of an OpenAI-compatible chat endpoint: one question, one answer, or one line that says why
there is none."""

import json
import os
import re
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests

from shardlab.core.errors import UserError

KEY_VARIABLE = "SHARDLAB_API_KEY"

_ATTEMPTS = 4
_BUSY = (429, 502, 503)
_LONGEST_LINE = 500
"""characters of a reason, or of a sentence of the server"""

Messages = list[dict[str, str]]


class Endpoint(NamedTuple):
    """A language model at a server."""

    url: str
    """base, ending in /v1"""
    model: str
    timeout_s: float = 120
    """longest wait for an answer"""
    pause_s: float = 1
    """before a busy server is asked again; doubles each time"""

    def answer(self, messages: Messages) -> str:
        """Return the text of the model's answer, without the key.

        Raises:
            UserError: the server gives none; one line says why.
        """
        key = os.environ.get(KEY_VARIABLE, "").strip()
        try:
            response = self._post(messages, key)
            # a server may repeat what it was sent
            reply = json.loads(response.text.replace(key, "[key]") if key else response.text)
        except requests.Timeout:
            raise self._failure(f"no answer within {self.timeout_s:g} s") from None
        except (json.JSONDecodeError, RecursionError):
            reply = None
        except (requests.RequestException, ValueError) as error:
            raise self._failure(type(error).__name__) from None  # ValueError: of its address
        complaint = reply.get("error") if isinstance(reply, dict) else None
        words = complaint.get("message") if isinstance(complaint, dict) else complaint
        sentence = f": {one_line(words)}" if isinstance(words, str) else ""
        if response.status_code != 200:
            raise self._failure(f"status {response.status_code}{sentence}")
        try:
            choice = reply["choices"][0]
            content, finish = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise self._failure(f"its reply is no chat completion{sentence}") from None
        if finish not in (None, "stop"):
            raise self._failure(f"the answer is incomplete: finish_reason {one_line(str(finish))}")
        if not isinstance(content, str):
            raise self._failure("the answer has no text")
        # JSON permits half of a surrogate pair, which no file can hold
        return content.encode(errors="replace").decode()

    def _post(self, messages: Messages, key: str) -> requests.Response:
        """Return the reply; a busy server is asked several times."""

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # as an `auth` it also keeps requests from sending a password of ~/.netrc
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        url = f"{self.url.rstrip('/')}/chat/completions"
        question: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0}
        how: dict[str, Any] = {"timeout": self.timeout_s, "allow_redirects": False}
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            response = requests.post(url, json=question, auth=authorize, **how)
            if response.status_code not in _BUSY:
                break
        return response

    def _failure(self, trouble: str) -> UserError:
        hint = f"check {KEY_VARIABLE}" if re.match("status 40[13]", trouble) else "check it"
        host = urlsplit(self.url).hostname
        return UserError(f"agent.endpoint: {host}: {trouble}; {hint}, or set agent.judge to rules")


def one_line(text: str) -> str:
    """Return one printable line of bounded length."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_LONGEST_LINE]
