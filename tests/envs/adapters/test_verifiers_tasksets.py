"""verifiers 0.4 in an environment of its own: on_verifiers_04.py has the tests."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
WORDS = ("-q", "-p", "no:cacheprovider", "--show-capture=no", "tests/envs/adapters/on_verifiers_04.py")


@pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers 0.4: make setup-verifiers")
def test_tasksets_of_verifiers_0_4() -> None:
    done = subprocess.run([str(PYTHON), "-m", "pytest", *WORDS], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-10_000:]
