import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.view import command
from tests.view.runs import make


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["view", *words]) == 2
    return capsys.readouterr().err


def test_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "There is no folder runs here" in refused([], capsys)
    assert "There is no folder runs/demo" in refused(["runs/demo"], capsys)
    assert "--port takes a number" in refused(["--port"], capsys)
    assert "--port takes a number" in refused(["--port=x"], capsys)
    assert "--port takes a number" in refused(["--port", "70000"], capsys)
    assert "--host: `birl view` has --port N" in refused(["--host"], capsys)
    assert "takes folders" in refused(["run=runs/demo"], capsys)


def test_help_is_about_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--help"]) == 0
    assert "127.0.0.1" in capsys.readouterr().out


def test_it_listens_on_the_loopback_and_takes_the_next_free_port() -> None:
    first, second = command.listen(None), command.listen(None)
    try:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] < second.getsockname()[1] < command.PORT + command.NEXT
        with pytest.raises(BirlError, match="cannot be used"):
            command.listen(first.getsockname()[1])
    finally:
        first.close()
        second.close()


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "demo")
    words = [sys.executable, "-m", "birl", "view", str(tmp_path / "runs" / "demo"), "--port", "0", "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"birl view: (http://127\.0\.0\.1:\d+/)(#/curves\?run=demo-\w{6})\n", said)
            assert found, said
            (run,) = json.load(urllib.request.urlopen(f"{found[1]}api/runs", timeout=10))["runs"]
            assert found[2].endswith(run["id"]) and run["step"] == 30
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_the_port_is_given_back(tmp_path: Path) -> None:
    listener = command.listen(0)
    port = listener.getsockname()[1]
    listener.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
