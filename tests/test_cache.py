import os
import time
from pathlib import Path

from birl.cache import ABANDONED, sweep


def _made(folder: Path, age: float) -> Path:
    folder.mkdir()
    (folder / "weights").write_text("x")
    for path in (folder / "weights", folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new = _made(tmp_path / "a.part-1", ABANDONED + 60), _made(tmp_path / "a.part-2", 60)
    done = _made(tmp_path / "a", ABANDONED + 60)
    busy = _made(tmp_path / "a.part-3", ABANDONED + 60)
    (busy / "weights").write_text("still writing")
    sweep(tmp_path, "*.part-*")
    assert not old.exists() and new.exists() and done.exists() and busy.exists()


def test_a_cache_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    sweep(tmp_path / "none", "*.part-*")
