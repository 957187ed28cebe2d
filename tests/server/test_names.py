"""Servers by name: found while they live, and nothing else."""

import asyncio
import os
import stat
import time
from pathlib import Path

import pytest

from birl.engines import names
from birl.errors import BirlError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_several_servers_have_one_name(cache: Path) -> None:
    assert names.find("exp/0") == []
    first, second = (names.register("exp/0", f"http://127.0.0.1:{port}", 7, "m") for port in (1, 2))
    other = names.register("exp/1", "http://127.0.0.1:3", 7, "m")
    assert names.find("exp/0") == ["http://127.0.0.1:1", "http://127.0.0.1:2"] and names.find("exp/1") == [
        other.address
    ]
    assert names.entries("exp/0") == [first, second]
    names.forget(first)
    assert names.find("exp/0") == [second.address]
    for entry in (second, other, other):
        names.forget(entry)
    assert list((cache / "servers").iterdir()) == []


def test_others_cannot_read_it(cache: Path) -> None:
    entry = names.register("exp/0", "http://127.0.0.1:1", 7, "m")
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (entry.file, *entry.file.parents[:3])]
    assert modes == [0o600, 0o700, 0o700, 0o700]


def test_who_does_not_beat_is_swept() -> None:
    dead, alive = (names.register("exp/0", f"http://127.0.0.1:{port}", 7, "m") for port in (1, 2))
    old = time.time() - names.LIFE - 1
    os.utime(dead.file, (old, old))
    assert names.find("exp/0") == [alive.address] and not dead.file.exists()
    names.touch(dead)  # it was only stopped for a while
    assert sorted(names.find("exp/0")) == [dead.address, alive.address]


async def test_it_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "BEAT", 0.01)
    entry = names.register("exp/0", "http://127.0.0.1:1", 7, "m")
    old = time.time() - names.LIFE - 1
    os.utime(entry.file, (old, old))
    task = asyncio.create_task(names.beat(entry))
    await asyncio.sleep(0.05)
    task.cancel()
    assert names.find("exp/0") == [entry.address]


def test_what_is_no_entry_is_left_out() -> None:
    entry = names.register("exp/0", "http://127.0.0.1:1", 7, "m")
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", "{}"), ("d.part", "x")):
        (entry.file.parent / name).write_text(text)
    assert names.find("exp/0") == [entry.address]


@pytest.mark.parametrize(
    "name",
    ["", "exp", "/exp/0", "exp/", "/0", "exp/0/1", "../0", "exp/..", "exp/.x", "a b/0", "exp/0\n", "exp\\0", "é/0"],
)
def test_bad_names_are_refused(name: str, cache: Path) -> None:
    for use in (names.find, lambda n: names.register(n, "http://127.0.0.1:1", 7, "m")):
        with pytest.raises(BirlError, match="must be experiment/trial"):
            use(name)
    assert not cache.exists()


def test_a_reader_whose_clock_is_wrong_removes_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = names.register("exp/0", "http://127.0.0.1:1", 7, "m")
    for ahead in (60.0, 1e6, -1e6):
        monkeypatch.setattr(names.time, "time", lambda ahead=ahead: 1.7e9 + ahead)
        assert names.find("exp/0") == [entry.address] and entry.file.exists()
    assert [f.name for f in entry.file.parent.iterdir()] == [entry.file.name]


def test_a_pipe_is_no_server() -> None:
    entry = names.register("exp/0", "http://127.0.0.1:1", 7, "m")
    os.mkfifo(entry.file.with_name("1-0.json"))
    assert names.find("exp/0") == [entry.address]
