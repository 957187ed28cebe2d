"""Checkpoints on an object store: nothing half counts, faults are tried again, and what comes back is what was sent."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import s3fs
import torch

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.checkpoints import Checkpoints
from birl.learner.store import COMPLETE, Store
from birl.parallel.ranks import Grid, Ranks
from birl.process import free_port
from birl.run_folder import fetched, find_checkpoint, recovered
from tests.parallel.processes import on_ranks
from tests.parallel.test_checkpoint import split_two_ways
from tests.train import test_offline as offline


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


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    """A real S3 server on this machine, and s3fs with its own client."""
    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    with pytest.MonkeyPatch.context() as patches:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patches.setenv(name, "testing")
        patches.setenv("AWS_ENDPOINT_URL", address)
        patches.setenv("AWS_DEFAULT_REGION", "us-east-1")
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 60
            while not listening(address):
                assert child.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir("bucket")
            yield
        finally:
            child.kill()
            child.wait()
            s3fs.S3FileSystem.clear_instance_cache()


def listening(address: str) -> bool:
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{tmp_path.name}"
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


def test_what_a_run_is_comes_back_as_it_was_through_faults(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a folder that is tried again goes into the folder that is there already."""
    run, again = tmp_path / "run", tmp_path / "again"
    for name in ("config.json", "model/config.json", "model/tokenizer.json", "model/more/a.txt", "metrics.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"this is {name}")
    store = Store(url, pause=0.001)
    breaking(store, 3, monkeypatch)
    store.about(run)
    store.take_about(again)
    found = {str(f.relative_to(again)): f.read_text() for f in again.rglob("*") if f.is_file()}
    names = ("config.json", "model/config.json", "model/tokenizer.json", "model/more/a.txt")
    assert found == {name: f"this is {name}" for name in names}


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


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_kill_in_the_middle_leaves_none_that_counts(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"file://{tmp_path}/store"
    if kind == "s3":
        request.getfixturevalue("s3")
        url = f"s3://bucket/{tmp_path.name}"
    store = Store(url)
    store.put(saved(tmp_path, 1), 1, Ranks(), None)
    path = saved(tmp_path, 2)
    for moment in (1, 3):
        done = subprocess.run([sys.executable, "-c", KILLED, url, str(path), str(moment)], timeout=60)
        assert done.returncode == -signal.SIGKILL and store.steps() == [1]
    store.put(path, 2, Ranks(), None)
    assert store.steps() == [1, 2] and store.fs.isfile(f"{store.root}/step-000002/{COMPLETE}")


def test_a_run_without_its_folder_goes_on_from_s3(tiny: Path, tmp_path: Path, s3: None) -> None:
    words = ("batch_size=3", "optimizer.lr=1e-3", "checkpoint.every=1")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    offline.run(tiny, tmp_path / "one", "sft", "steps=4", *words)
    offline.run(tiny, tmp_path / "two", "sft", "steps=2", *words, "checkpoint.store=s3://bucket/runs")
    shutil.rmtree(tmp_path / "two/run")
    offline.run(tiny, tmp_path / "two", "sft", "steps=4", *words, "checkpoint.store=s3://bucket/runs")
    one, two = ([step["loss"] for step in offline.log(tmp_path / f)] for f in ("one", "two"))
    assert two == one[2:]
    assert Store("s3://bucket/runs/run").steps() == [3, 4]


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


def test_a_store_that_is_out_of_reach_for_a_while_is_no_reason_for_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would go on from step 1, and write its own step 2 over the one that is there."""
    url = f"file://{tmp_path}/store"
    store = Store(url)
    for step in (1, 2):
        store.put(saved(tmp_path, step), step, Ranks(), None)
    monkeypatch.setattr(Store, "__init__", partialmethod(Store.__init__, pause=0.0))
    with monkeypatch.context() as patches:
        get = type(store.fs).get_file

        def away(self: Any, there: str, here: str, **options: Any) -> None:
            if "step-000002" in there:
                raise ConnectionError("no route to host")
            get(self, there, here, **options)

        patches.setattr(type(store.fs), "get_file", away)
        with pytest.raises(BirlError, match="in 6 tries: no route to host"):
            recovered(url, tmp_path / "run")
    store.fs.rm(f"{store.root}/step-000002/tensors/__0_0.distcp")  # that is damage: nothing brings it back
    path = recovered(url, tmp_path / "run")
    assert path is not None and path.name == "step-000001"


def test_a_checkpoint_of_a_store_is_taken_again_by_a_run_that_ended_before_its_first(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    store.put(saved(tmp_path, 1), 1, Ranks(), None)
    for _ in range(2):
        assert not checkpoint.verify(fetched(store.url, tmp_path / "run/resumed"))


def test_another_run_of_that_name_deletes_no_checkpoint_and_loses_none(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/s/run")
    store.put(saved(tmp_path / "one", 2), 2, Ranks(), None)
    words = ["data.train=[given]", "checkpoint.keep_last=1", f"checkpoint.store=file://{tmp_path}/s", "resume=never"]
    config = load(schema.SFT, words)
    with pytest.raises(BirlError, match="has the checkpoints of a run of this name"):
        find_checkpoint(config, tmp_path / "two/run")
    written = Checkpoints(run=tmp_path / "two/run", keys=config.checkpoint, ranks=Ranks())
    written.copy(saved(tmp_path / "two", 1), 1, set(), None)
    assert store.steps() == [1, 2] and not written.warnings
