"""Kernels are compiled once for each source, compiler and processor, and whoever starts that is told."""

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from birl.kernels import compiling


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were given to the compiler, which is a file that does nothing."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"kernels")
        return subprocess.CompletedProcess(command, 0, "", "")

    (tmp_path / "cc").write_text("")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling.subprocess, "run", run)
    return commands


def test_compiling_is_told_once(compiled: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert compiling.build(torch.float32, 64).exists()
    assert len(compiled) == 1
    told = r"birl: compiling kernels for float32 and heads of 64, once for this processor, \d+ s\n"
    assert re.fullmatch(told, capsys.readouterr().err)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:9], lambda b: b"", lambda b: b[:3] + b"?" + b[4:]])
def test_a_damaged_file_is_told_and_compiled_again(
    compiled: list[list[str]], damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The beginning of one ended the process at every start, without a word, or was passed over."""
    file = compiling.build(torch.float32, 64)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    capsys.readouterr()
    assert compiling.build(torch.float32, 64) == file and file.read_bytes() == whole and len(compiled) == 2
    assert capsys.readouterr().err.startswith(f"birl: {file} is damaged.\nbirl: compiling kernels")


def test_processes_that_start_together_compile_once(compiled: list[list[str]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(lambda _: compiling.build(torch.bfloat16, 64), range(8)))
    assert len(set(files)) == len(compiled) == 1


def test_another_compiler_or_processor_compiles_anew(
    compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [compiling.build(torch.float32, 64)]
    os.utime(tmp_path / "cc", (1, 1))  # an upgrade
    files.append(compiling.build(torch.float32, 64))
    monkeypatch.setattr(compiling, "processor", lambda: "another")
    files.append(compiling.build(torch.float32, 64))
    assert len(set(files)) == len(compiled) == 3


def test_a_compiler_that_fails_says_why(
    compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "cc: no space left\nmore\n")
    monkeypatch.setattr(compiling.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(OSError, match=r"^cc: no space left$"):
        compiling.build(torch.float32, 64)
    assert capsys.readouterr().err.endswith("s\n")
