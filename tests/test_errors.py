"""What ends a command is told without what a terminal would obey."""

import errno
import os
import sys

import pytest

from birl import cli
from birl.errors import BirlError, tell

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
