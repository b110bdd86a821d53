"""Client of an OpenAI-compatible chat endpoint: one question, one answer, or one line that says why
there is none."""

import ipaddress
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
        if key and urlsplit(self.url).scheme == "http" and not self._on_this_machine:
            raise self._failure(
                f"http would send {KEY_VARIABLE} in clear text: use https, or unset it"
            )
        try:
            status, reply, text = self._ask(messages, key)
        except requests.Timeout:
            raise self._failure(f"no answer within {self.timeout_s:g} s") from None
        except (requests.RequestException, ValueError) as error:
            raise self._failure(type(error).__name__) from None  # ValueError: of its address
        said = _sentence(reply, text)
        if status != 200:
            raise self._failure(f"status {status}{said}")
        if isinstance(reply, dict) and reply.get("choices") == []:
            raise self._failure(f"its reply has no choices{said}")
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            content = message["content"]
        except (LookupError, TypeError, AttributeError):
            raise self._failure(f"its reply is no chat completion{said}") from None
        if finish not in (None, "stop"):
            trouble = f"the answer is incomplete: finish_reason {one_line(str(finish))}"
            raise self._failure(trouble + _spent_on_thoughts(message, reply))
        if not isinstance(content, str) or not content.strip():
            refusal = message.get("refusal")
            reason = f": {one_line(refusal)}" if isinstance(refusal, str) else ""
            raise self._failure(f"the answer has no text{reason}")
        # JSON permits half of a surrogate pair, which no file can hold
        return content.encode(errors="replace").decode()

    @property
    def _on_this_machine(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def _ask(self, messages: Messages, key: str) -> tuple[int, Any, str]:
        """Return status, JSON (None: none) and text of the reply, without the key; a busy server is
        asked several times."""

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # as an `auth` it also keeps requests from sending a password of ~/.netrc
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        url = f"{self.url.rstrip('/')}/chat/completions"
        question: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0}
        how: dict[str, Any] = {"timeout": self.timeout_s, "allow_redirects": False}
        with requests.Session() as session:
            # no proxy of the environment reads what is for this machine; it only tunnels https
            session.trust_env = urlsplit(url).scheme == "https" or not self._on_this_machine
            for attempt in range(_ATTEMPTS):
                if attempt:
                    time.sleep(self.pause_s * 2 ** (attempt - 1))
                response = session.post(url, json=question, auth=authorize, **how)
                # a server may repeat what it was sent
                text = response.text.replace(key, "[key]") if key else response.text
                try:
                    reply = json.loads(text)
                except (json.JSONDecodeError, RecursionError):
                    reply = None
                status = _status(response.status_code, reply)
                if status not in _BUSY and not (status == 200 and _is_empty(reply)):
                    break
        return status, reply, text

    def _failure(self, trouble: str) -> UserError:
        hint = f"check {KEY_VARIABLE}" if re.match("status 40[13]", trouble) else "check it"
        host = urlsplit(self.url).hostname
        return UserError(f"agent.endpoint: {host}: {trouble}; {hint}, or set agent.judge to rules")


def _is_empty(reply: Any) -> bool:
    return isinstance(reply, dict) and reply.get("choices") == [] and "error" not in reply


def _status(status: int, reply: Any) -> int:
    """Return the status of a reply; that of its error where a proxy has put it into a 200."""
    error = reply.get("error") if isinstance(reply, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    inside = re.fullmatch("[45][0-9]{2}", str(code))
    return int(inside[0]) if status == 200 and inside else status


def _sentence(reply: Any, text: str) -> str:
    """Return what the server says of its failure, after a colon, or nothing."""
    if not isinstance(reply, dict):
        # servers also answer in plain text; a page says nothing in one line
        is_text = reply is None and text.strip() and not re.match(r"\s*[<\[{]", text)
        return f": {one_line(text)}" if is_text else ""
    for said in (reply.get("error"), reply.get("detail"), reply.get("message")):
        words: Any = said
        if isinstance(words, dict):
            words = words.get("message")
        if isinstance(words, list) and words and isinstance(words[0], dict):
            words = words[0].get("msg")
        if isinstance(words, str) and words.strip():
            return f": {one_line(words)}"
    return ""


def _spent_on_thoughts(message: Any, reply: Any) -> str:
    """Return in words that a model was still thinking when its answer was cut, or nothing."""
    content = message.get("content") or ""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    open_tag = re.match(r"\s*<think", str(content)) and "</think" not in str(content)
    if not open_tag and (not thoughts or str(content).strip()):
        return ""
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    count = f"all {tokens} tokens" if isinstance(tokens, int) else "all tokens"
    return f": {count} went into thinking: raise the server's limit of tokens, or think less"


def one_line(text: str) -> str:
    """Return one printable line of bounded length."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_LONGEST_LINE]
