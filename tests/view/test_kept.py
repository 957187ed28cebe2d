import json
from pathlib import Path

import numpy as np
import pytest

from birl.view import episodes as module
from birl.view import kept
from birl.view.episodes import Episodes
from tests.view.made import record, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "WORTH", 10)
    return tmp_path / "cache" / "rollouts"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write(tmp_path / "run" / "rollouts.jsonl", [record(step=n, group=n, text=f"row {n}") for n in range(30)])
    with path.open("ab") as file:
        file.write(b"{broken\n")
    return path


def opened(path: Path) -> Episodes:
    found = Episodes(path)
    found.read_on()
    return found


def reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Episodes, int]:
    """The index of a new session, and how many lines it read."""
    lines, own = 0, Episodes._append

    def counted(self: Episodes, found: list) -> None:
        nonlocal lines
        lines += len(found)
        own(self, found)

    monkeypatch.setattr(Episodes, "_append", counted)
    return opened(path), lines


def test_a_second_session_reads_only_what_is_new(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(path)
    assert len(list(cache.iterdir())) == 1 and not list(path.parent.glob("*.npz"))
    write(path, [record(step=31, task="new", text="row 30")], "ab")
    second, lines = reads(path, monkeypatch)
    assert lines == 1 and second.count == 31 and list(second.tasks)[-1] == "new"
    assert np.array_equal(second.rows[:30].tobytes(), first.rows.tobytes())
    assert (second.skipped, second.broken) == (1, first.broken) and second.lines == 32
    assert second.head(30)["text"] == "row 30" and second.head(7)["text"] == "row 7"


def test_an_index_of_another_file_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path)
    write(path, [record(step=n, group=n, text=f"another {n}") for n in range(40)])
    found, lines = reads(path, monkeypatch)
    assert lines == 40 and found.head(3)["text"] == "another 3" and found.skipped == 0


def test_a_file_that_was_cut_back_meanwhile_is_read_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path)
    with path.open("r+b") as file:
        file.truncate(1000)
    found, lines = reads(path, monkeypatch)
    assert 0 < found.count == lines < 5


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 broken", b"\x93NUMPY", b"{}"])
def test_a_damaged_index_is_not_used(path: Path, cache: Path, data: bytes) -> None:
    opened(path)
    (file,) = cache.iterdir()
    file.write_bytes(data)
    assert opened(path).count == 30


def test_an_index_of_an_unknown_version_of_zip_is_not_used(path: Path, cache: Path) -> None:
    """One changed byte, of which zipfile raises NotImplementedError; others raise tokenize's error."""
    opened(path)
    (file,) = cache.iterdir()
    data = file.read_bytes()
    place = data.index(b"PK\x01\x02") + 6
    file.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    assert opened(path).count == 30 and opened(path).head(29)["text"] == "row 29"


def test_an_index_with_too_few_rows_is_not_used(path: Path, cache: Path) -> None:
    opened(path)
    (file,) = cache.iterdir()
    with np.load(file) as stored:
        rows, about = stored["rows"], stored["about"]
    with file.open("wb") as target:
        np.savez(target, rows=rows[:12], about=about)
    assert not kept.load(Episodes(path), module.ROW)


def test_an_index_that_lacks_something_is_not_used(path: Path, cache: Path) -> None:
    opened(path)
    (file,) = cache.iterdir()
    about = np.frombuffer(json.dumps({"made_by": kept.MADE_BY, "read": 3}).encode(), np.uint8)
    with file.open("wb") as target:
        np.savez(target, rows=np.zeros(30, module.ROW), about=about)
    assert opened(path).count == 30


def test_another_version_of_the_index_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path)
    monkeypatch.setattr(kept, "MADE_BY", 999)
    assert reads(path, monkeypatch)[1] == 30


def test_other_columns_are_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path)
    found = Episodes(path)
    assert not kept.load(found, np.dtype([("at", "<i8")])) and kept.load(found, module.ROW)


def test_a_cache_that_cannot_be_written_is_none(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "file"))
    assert opened(path).count == 30 and opened(path).count == 30


def test_only_some_are_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FILES", 3)
    for n in range(5):
        opened(write(tmp_path / str(n) / "rollouts.jsonl", [record(step=s) for s in range(12)]))
    assert len(list(cache.iterdir())) == 3
