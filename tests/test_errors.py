"""What ends a command is told without what a terminal would obey."""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from birl import cli
from birl.cli import chat
from birl.errors import BirlError, tell
from birl.text.chat import Chat
from tests.tiny import tiny_model_folder

EVIL = "\x1b]0;owned\x07 \x1b[2J \u202e"


def test_a_limit_of_the_shell_is_no_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    tell(BirlError(f"metrics.jsonl: {os.strerror(errno.EFBIG)}. Make room."))
    assert "birl: `ulimit -f` shows the limit of a file's size; raise it." in capsys.readouterr().err


@pytest.mark.parametrize("kind", [BirlError, RuntimeError])
def test_no_escape_of_an_error_reaches_the_terminal(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda words: (_ for _ in ()).throw(kind(f"{EVIL}\nsecond line")))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    if kind is BirlError:
        assert cli.main([]) == 2
    else:
        with pytest.raises(RuntimeError) as raised:
            cli.main([])
        sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\u202e" not in said and "⟪U+001B⟫[2J" in said and "second line\n" in said


def test_no_escape_of_a_folder_or_a_model_reaches_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "checkpoints/step-000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"files": {EVIL: {"bytes": 1, "sha256": "0" * 64}}}))
    rows = ({"event": "sampled", "tokens": 3}, {"event": "settled", "step": 1, "tokens": {EVIL: 3}})
    about = {"life": 1, "group": 0}
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(about | row)}\n" for row in rows))
    monkeypatch.setattr(chat, "_ask", iter(["Hi", None]).__next__)
    monkeypatch.setattr(Chat, "reply_text", lambda *_: EVIL)
    model = str(tiny_model_folder(tmp_path / "model"))
    for words in (["checkpoints", str(tmp_path), "verify"], ["ledger", str(tmp_path)], ["chat", model, "max_tokens=1"]):
        cli.main(words)
        said = "".join(capsys.readouterr())
        assert "\x1b" not in said and "\u202e" not in said and "⟪U+001B⟫[2J" in said, words


def test_ctrl_c_ends_a_conversation_at_its_prompt(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process waited for the line, which a thread was reading. A line that is not UTF-8 ended it."""
    lines, waited = iter(["caf\udce9"]), list[str]()

    def line(prompt: str) -> str:
        for text in lines:
            return text
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        waited.append(prompt)
        raise EOFError

    monkeypatch.setattr("builtins.input", line)
    assert cli.main(["chat", str(tiny)]) == 130 and not waited
    assert "This line is not UTF-8" in capsys.readouterr().out
