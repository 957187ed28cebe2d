from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rewards.hostile import Hostile, hostile
from tests.rewards.mine import FUNCTIONS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of judges' replies, which is this test's own."""
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "judge"


@pytest.fixture
def server() -> Iterator[Hostile]:
    with hostile() as result:
        yield result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a user's functions in mine.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path
