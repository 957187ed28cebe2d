"""Which sandbox is taken: what a trial run shows, whatever is installed."""

import asyncio
import stat
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.sandbox import command, open
from birl.sandbox.local import LocalSandbox


def opened(kind: str = "auto") -> LocalSandbox:
    found = asyncio.run(open.open_sandbox(kind, workers=1))
    assert isinstance(found, LocalSandbox)
    asyncio.run(found.close())
    return found


def test_auto_takes_the_first_that_works() -> None:
    assert opened().kind == "zygote"


def fake_bwrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setattr(command, "SYSTEM_PATH", f"{folder}:{command.SYSTEM_PATH}")
    for place in (folder, *folder.parents):  # bwrap is started by a user that owns nothing
        if place.stat().st_mode & stat.S_IXOTH == 0:
            place.chmod(place.stat().st_mode | stat.S_IXOTH)


def test_a_bubblewrap_that_is_there_but_fails_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_bwrap(tmp_path, monkeypatch, "echo 'bwrap: Creating new namespace failed' >&2; exit 1")
    assert opened().kind == "landlock"
    assert "sandbox.kind=auto is landlock here" in caplog.text and "Creating new namespace failed" in caplog.text
    with pytest.raises(BirlError, match=r"sandbox\.kind=bubblewrap does not work .*Creating new namespace failed"):
        opened("bubblewrap")


def test_a_bubblewrap_that_isolates_nothing_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts the guest, which answers well."""
    script = f"export PYTHONPATH={command.HERE.parent.parent}; for last; do :; done; "
    script += f"exec {command.interpreters()[-1]} -m birl.sandbox.guest $last"
    fake_bwrap(tmp_path, monkeypatch, script)
    for kind in ("bubblewrap", "zygote"):
        assert "no namespace of processes" in asyncio.run(open.problem(kind, command.interpreters()[-1]))


def test_the_trial_run_sees_what_a_program_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open, "LocalSandbox", lambda _, **options: LocalSandbox("process", **options))
    reason = asyncio.run(open.problem("landlock", command.interpreters()[-1]))
    assert "a program in it could open a socket" in reason and "write to /var/tmp" in reason


def test_without_any_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SYSTEM_PATH", "/nowhere")
    monkeypatch.setattr(open, "AUTO", ("zygote", "bubblewrap"))
    with pytest.raises(
        BirlError, match=r"there is no \w+ on this machine: install .*apt-get install bubblewrap"
    ) as error:
        opened()
    assert str(error.value).count("there is no") == 1 and "zygote, bubblewrap: there is no" in str(error.value)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(BirlError, match=r"sandbox\.kind=docker: must be auto \| zygote"):
        opened("docker")


def test_process_is_never_taken_by_itself() -> None:
    assert "process" not in open.AUTO and opened("process").kind == "process"


def test_a_guest_that_talks_nonsense_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("b'\\x00\\x00\\x00\\x03[1]'", "b'\\xff\\xff\\xff\\xff'", "b''", "b'\\x00\\x00\\x00\\x02{'"):
        code = f"import os, sys; os.write(int(sys.argv[1]), {said})"
        monkeypatch.setattr(command, "plain", lambda python, fd, code=code: [python, "-c", code, str(fd)])
        reason = asyncio.run(open.problem("landlock", "/usr/bin/python3"))
        assert "landlock cannot be started" in reason
