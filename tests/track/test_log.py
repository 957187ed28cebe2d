import errno
import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.regular import write_whole, writing
from birl.track.log import JsonLog, encode, read_jsonl


def test_not_a_number_is_valid_json() -> None:
    line = encode({"a": math.nan, "b": [1.0, -math.inf], "c": {"d": (math.nan, 2)}})
    assert json.loads(line) == {"a": None, "b": [1.0, None], "c": {"d": [None, 2]}}


def test_floats_in_lists_keep_six_digits_and_the_rest_keeps_all() -> None:
    assert encode({"x": 0.123456789, "logprobs": [-0.123456789]}) == b'{"x":0.123456789,"logprobs":[-0.123457]}\n'


def test_any_text_survives(tmp_path: Path) -> None:
    text = "\u2028 \u2029 \x85 \\\x85 \x00 \ud800 \u202e 中 😀 \n"
    with closing(JsonLog(tmp_path / "a.jsonl")) as log:
        log.append([{"text": text}, {"text": "b"}])
    assert read_jsonl(tmp_path / "a.jsonl") == [{"text": text}, {"text": "b"}]
    assert len((tmp_path / "a.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()) == 2


def test_scalars_of_other_libraries_are_numbers() -> None:
    import numpy as np

    assert json.loads(encode({"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan")})) == {
        "a": 0.5,
        "b": 3,
        "c": None,
    }


@pytest.mark.parametrize("tail", [b'{"step":3,"rew', b'{"step":3', b"\x00\x00\x00"])
def test_a_torn_last_line_is_passed_over(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n' + tail)
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_any_other_bad_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\n{"step":2}\n')
    with pytest.raises(BirlError, match=r"metrics\.jsonl, line 2"):
        read_jsonl(path)


def test_cut_never_fills_a_short_file_with_zeros(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"ste')
    with closing(JsonLog(path)) as log:
        assert not log.cut(1000)
    assert path.read_bytes() == b'{"step":1}\n'


def test_cut_leaves_no_half_line_where_a_longer_line_has_moved_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"note":"by hand"}\n{"step":2}\n{"step":3}\n')
    with closing(JsonLog(path)) as log:
        assert not log.cut(len(b'{"step":1}\n{"step":2}\n{"step":3}\n'))  # as the checkpoint knows it
        log.append([{"step": 4}])
        assert [row["step"] for row in read_jsonl(path)] == [1, 4]
        assert log.cut(0) and path.read_bytes() == b""


def test_a_full_disk_is_an_error_with_file_and_fix_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.append([{"step": 1}])
    real = log._file

    class Full:
        def write(self, data: memoryview) -> int:
            if len(data) > 4:
                return real.write(data[:4])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(BirlError, match=r"metrics\.jsonl: No space left on device.*start the same command again"):
        log.append([{"step": 2}])
    assert read_jsonl(log.path) == [{"step": 1}]
    assert log.path.read_bytes().endswith(b"\n")
    log.close()


def test_a_real_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with (
        pytest.raises(BirlError, match="/dev/full"),
        writing(Path("/dev/full")),
        open("/dev/full", "wb", buffering=0) as f,
    ):
        f.write(b"x")


def test_write_whole_leaves_no_half_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", b"1")
    write_whole(tmp_path / "a.json", b"2")
    assert (tmp_path / "a.json").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("tail", [os.urandom(3000), b"\n\n\0\n", b'{"a":', b"7\n", b"[" * 100_000 + b"\n", b""])
def test_whatever_is_behind_the_last_record_is_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n' + tail)
    with closing(JsonLog(path)) as log:
        log.cut(10**9)
        log.append([{"a": 3}])
    assert [row["a"] for row in read_jsonl(path)] == [1, 2, 3]


def test_a_pipe_in_the_place_of_a_log_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for opened in (JsonLog, read_jsonl):
        with pytest.raises((BirlError, OSError), match="a named pipe, not a regular file"):
            opened(tmp_path / "a.jsonl")
