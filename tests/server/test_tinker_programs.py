"""Programs of Tinker's cookbook run unchanged against `birl tinker`, from their first step to their last checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.tinker_programs import NAMES, PROGRAMS, PYTHON, play, world
from tests.server.tinker_server import Server, serving

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Tinker cookbook: make setup-tinker"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path_factory.mktemp("cookbook")
    with serving(world(folder), folder / "state", f"names=[{','.join(NAMES)}]") as server:
        yield folder, server


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_to_its_end(place: tuple[Path, Server], name: str) -> None:
    folder, server = place
    found = play(name, folder, server.url)
    if PROGRAMS[name].kl:
        gaps = {key: value for key, value in found.items() if key.startswith("optim/kl_sample_train")}
        assert gaps and all(abs(value) <= 1e-6 for value in gaps.values())
