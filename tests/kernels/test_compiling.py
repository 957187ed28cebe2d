"""What is said while kernels compile: on a busy machine it takes a minute."""

import subprocess
from pathlib import Path

import pytest
import torch

from birl import kernels


def test_compiling_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("BIRL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels.subprocess, "run", compiled)
    for _ in range(2):
        assert kernels.build(torch.float32, 64).exists()
    assert capsys.readouterr().err == "Compiling kernels for this processor, once ...\n"
