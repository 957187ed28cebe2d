"""Checkpoints on an object store: nothing half counts, faults are tried again, and what comes back is what was sent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.store import COMPLETE, Store
from birl.parallel.ranks import Grid, Ranks
from tests.parallel.processes import on_ranks
from tests.parallel.test_checkpoint import split_two_ways


def saved(root: Path, step: int) -> Path:
    return checkpoint.save(root, step, {"a": torch.full((1000,), float(step))}, {"version": step})


def breaking(store: Store, every: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every n-th request fails, uploads after half of their bytes."""
    count = [0]

    def broken(name: str) -> Any:
        original = getattr(store.fs, name)

        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] % every == 0:
                if name == "put_file":
                    half = Path(args[0]).read_bytes()[: os.path.getsize(args[0]) // 2]
                    store.fs.pipe_file(args[1], half)
                raise ConnectionError("the connection was reset")
            return original(*args, **options)

        return call

    for name in ("put_file", "get_file", "cat_file", "rm"):
        monkeypatch.setattr(store.fs, name, broken(name), raising=False)
    return count


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/store"


def test_what_comes_back_is_what_was_sent_through_faults(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url, pause=0.001)
    count = breaking(store, 3, monkeypatch)
    for step in (1, 2, 3):
        store.put(saved(tmp_path / "here", step), step, Ranks(), None)
    assert store.steps() == [1, 2, 3] and count[0] >= 12  # of which every third failed
    assert store.prune(1, {1}) == [2]
    assert store.steps() == [1, 3]
    path = store.take(3, tmp_path / "there")
    assert not checkpoint.verify(path) and checkpoint.read_tensors(path)["a"][0] == 3.0


def test_faults_that_stay_are_an_error_and_nothing_counts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url, pause=0.001)
    store.put(saved(tmp_path, 1), 1, Ranks(), None)
    with monkeypatch.context() as patches:
        breaking(store, 1, patches)
        with pytest.raises(BirlError, match="in 6 tries: the connection was reset"):
            store.put(saved(tmp_path, 2), 2, Ranks(), None)
    assert store.steps() == [1]


def test_damage_on_the_store_is_refused(url: str, tmp_path: Path) -> None:
    store = Store(url, pause=0.001)
    store.put(saved(tmp_path, 1), 1, Ranks(), None)
    name = f"{store.root}/step-000001/tensors/__0_0.distcp"
    content = bytearray(store.fs.cat_file(name))
    content[100] ^= 1
    store.fs.pipe_file(name, bytes(content))
    with pytest.raises(BirlError, match=r"is damaged: .*SHA-256"):
        store.take(1, tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from birl.learner.store import Store
from birl.parallel.ranks import Ranks
store, count = Store(sys.argv[1]), 0
original = store._upload
def upload(file, target):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    original(file, target)
store._upload = upload
store.put(Path(sys.argv[2]), 2, Ranks(), None)
"""


def test_a_kill_in_the_middle_leaves_none_that_counts(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = Store(url)
    store.put(saved(tmp_path, 1), 1, Ranks(), None)
    path = saved(tmp_path, 2)
    for moment in (1, 3):
        done = subprocess.run([sys.executable, "-c", KILLED, url, str(path), str(moment)], timeout=60)
        assert done.returncode == -signal.SIGKILL and store.steps() == [1]
    store.put(path, 2, Ranks(), None)
    assert store.steps() == [1, 2] and (tmp_path / "store" / "step-000002" / COMPLETE).is_file()


def each_its_own(ranks: Ranks, root: Path, url: str) -> list[str]:
    path = checkpoint.save(root, 1, split_two_ways(ranks, 1.0), {}, ranks)
    store, sent = Store(url), []
    original = store._upload
    store._upload = lambda file, target: (sent.append(file.name), original(file, target))[1]
    store.put(path, 1, ranks, None)
    return sent


def test_each_rank_sends_its_own_files(tmp_path: Path) -> None:
    first, second = on_ranks(Grid(fsdp=2), each_its_own, tmp_path / "here", f"file://{tmp_path}/store")
    assert "__0_0.distcp" in first and "manifest.json" in first and second == ["__1_0.distcp"]
    assert not checkpoint.verify(Store(f"file://{tmp_path}/store").take(1, tmp_path / "there"))


def test_an_unknown_store_says_what_to_install() -> None:
    with pytest.raises(BirlError, match=r"checkpoint\.store=nowhere://x"):
        Store("nowhere://x")
    assert "s3" in fsspec.available_protocols()
