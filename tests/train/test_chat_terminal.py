"""Prompt line: escapes, and how a conversation ends."""

import io
import os
import pty
import runpy
import select
import signal
import sys
import time
import unicodedata
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.train.chat_terminal import converse, printable
from tests.commands import ROOT, Command
from tests.train.test_conversation import run  # noqa: F401 - a fixture


@given(st.text())
def test_no_control_character_reaches_the_terminal(text):
    shown = printable(text)
    controls = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert controls <= {"\n", "\t", "\u200c", "\u200d"}
    if text.isprintable():
        assert shown == text


def test_sequences_of_a_terminal_are_shown():
    assert printable("a\x1b[2J\x9b\r\u202eb\n") == "a\\x1b[2J\\x9b\\r\\u202eb\n"


class Interrupted:
    """Conversation whose first answer is interrupted by Ctrl-C."""

    def __init__(self):
        self.prompts = []

    def answer(self, text):
        self.prompts.append(text)
        yield "some"
        if len(self.prompts) == 1:
            raise KeyboardInterrupt
        yield " words"


def test_ctrl_c_ends_one_answer_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\udcff\n"))
    conversation = Interrupted()
    converse(conversation)
    assert conversation.prompts == ["first", "second?"]
    assert capsys.readouterr().out == "some\nsome words\n"


class Failing:
    """Conversation whose first answer fails after a word."""

    def __init__(self):
        self.prompts = []

    def answer(self, text):
        self.prompts.append(text)
        yield "word"
        if len(self.prompts) == 1:
            raise UserError("no answer: out of memory")


def test_an_answer_that_fails_is_one_line_and_the_conversation_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    converse(Failing())
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("word\nword\n", "chat: error: no answer: out of memory\n")


def test_who_reads_the_answer_may_stop(run, tmp_path):  # noqa: F811
    reader, writer = os.pipe()
    os.close(reader)

    def call() -> None:
        sys.stdout = os.fdopen(writer, "w")
        os.chdir(ROOT)
        sys.argv = ["stages.chat", str(run / "final_model"), "--prompt", "Some"]
        runpy.run_module("stages.chat", run_name="__main__", alter_sys=True)

    command = Command(tmp_path / "command", call)
    os.close(writer)
    assert (command.wait(), command.said()) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("key", [b"\x03", b"\x04"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_end_the_conversation(run, key, tmp_path):  # noqa: F811
    theirs, ours = pty.openpty()

    def call() -> None:
        at_a_terminal(ours)
        os.chdir(ROOT)
        sys.argv = ["stages.chat", str(run / "final_model"), "--tokens", "3"]
        runpy.run_module("stages.chat", run_name="__main__", alter_sys=True)

    command = Command(tmp_path / "command", call)
    os.close(ours)
    said = wait_for(theirs, b"> ", 1)
    os.write(theirs, b"Some words\n")
    said += wait_for(theirs, b"> ", 1)
    # again, should the answer have looked like a prompt
    for _ in range(30):
        os.write(theirs, key)
        with suppress(AssertionError):  # still there
            command.wait(3)
            break
    assert command.wait(0) == 0, command.said()
    assert b"Traceback" not in said
    os.close(theirs)


def at_a_terminal(terminal):
    """Take it as the controlling terminal, and as stdin, stdout and stderr of a forked process."""
    os.close(os.open(os.ttyname(terminal), os.O_RDWR))
    for descriptor in range(3):
        os.dup2(terminal, descriptor)
    sys.stdin = os.fdopen(0)


def wait_for(terminal, text, count):
    said, deadline = b"", time.monotonic() + 120
    while said.count(text) < count:
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 4096)
    return said
