import json
import os
from pathlib import Path

import numpy as np
import pytest

from birl.view.columns import Columns, parse
from tests.view.runs import append, long, make


def table(path: Path, *lines: str) -> Columns:
    path.write_text("".join(lines))
    found = Columns(path)
    found.read()
    return found


def test_columns_have_what_the_lines_have(tmp_path: Path) -> None:
    found = table(
        tmp_path / "m.jsonl",
        '{"step":1,"time":"2026-03-01T08:00:00.000+00:00","a":0.5,"b":null}\n',
        '{"step":2,"time":"2026-03-01T08:00:04.500+00:00","a":1,"b":3.25}\n',
        '{"step":3,"a":2.5,"c":7,"text":"x","list":[1],"flag":true}\n',
    )
    assert found.rows == 3 and found.broken == 0 and found.names == ["a", "b", "c"]
    np.testing.assert_array_equal(found["step"], [1, 2, 3])
    np.testing.assert_array_equal(found["a"], [0.5, 1, 2.5])
    np.testing.assert_array_equal(found["b"], [np.nan, 3.25, np.nan])
    np.testing.assert_array_equal(found["c"], [np.nan, np.nan, 7])
    assert found["time"][1] - found["time"][0] == 4.5 and np.isnan(found["time"][2])
    assert np.isnan(found["no such name"]).all() and len(found["no such name"]) == 3


def test_a_half_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    found = table(path, '{"step":1,"a":1}\n{"step":2,"a"')
    assert found.rows == 1 and not found.read()
    with path.open("a") as file:
        file.write(':2}\n{"step":3,"a":3}\n')
    assert found.read() and found.generation == 0
    np.testing.assert_array_equal(found["a"], [1, 2, 3])


def test_lines_that_are_no_record_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = ['{"step":1,"a":1}\n', "garbage\n", "\n", "[1]\n", '{"a":2}\n', '{"step":"2"}\n', '{"step":2\n', '"a":3}\n']
    found = table(tmp_path / "m.jsonl", *lines, '{"step":3,"a":1e999}\n', "9" * 400 + "\n", '{"step":4,"a":-5}\n')
    np.testing.assert_array_equal(found["step"], [1, 3, 4])
    np.testing.assert_array_equal(found["a"], [1, np.inf, -5])
    assert found.broken == 8


def test_numbers_too_large_for_a_float_are_nan(tmp_path: Path) -> None:
    found = table(tmp_path / "m.jsonl", '{"step":1,"a":' + "9" * 400 + '}\n{"step":2,"a":2}\n')
    np.testing.assert_array_equal(found["a"], [np.nan, 2])


def test_two_broken_lines_do_not_heal_each_other() -> None:
    assert parse([b'{"a":1', b'"b":2}']) == []
    assert parse([b'{"a":1', b'"b":2}', b'{"c":3},{"d":4}']) == []  # joined they would be as many values as lines
    assert parse([b'{"a":1}', b"2"]) == [{"a": 1}, 2]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1,"a":1}\n\xff\xfe\x00\n{"step":2,"a":2}\n')
    found = Columns(path)
    found.read()
    assert found.rows == 2 and found.broken == 1


def test_a_file_that_is_not_there_is_empty_until_it_is(tmp_path: Path) -> None:
    found = Columns(tmp_path / "m.jsonl")
    assert not found.read() and found.rows == 0
    found.path.write_text('{"step":1,"a":1}\n')
    assert found.read() and found.rows == 1
    found.path.unlink()
    assert found.read() and found.rows == 0


def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=20)
    path = run / "metrics.jsonl"
    found = Columns(path)
    found.read()
    size = len("".join(path.read_text().splitlines(keepends=True)[:10]))
    os.truncate(path, size)
    assert found.read() and found.rows == 10 and found.generation == 1
    append(run, 11, 15)
    assert found.read() and found.rows == 15 and found.generation == 1


def test_a_file_that_was_cut_back_and_grew_beyond_is_read_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=20)
    path = run / "metrics.jsonl"
    found = Columns(path)
    found.read()
    os.truncate(path, len("".join(path.read_text().splitlines(keepends=True)[:10])))
    append(run, 11, 40)
    assert found.read() and found.generation == 1
    np.testing.assert_array_equal(found["step"], np.arange(1, 41))


def test_names_that_come_late_and_blocks_that_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.track.log.BLOCK", 37)
    monkeypatch.setattr("birl.view.columns.BATCH", 3)
    rows = [{"step": i, "a": i / 7, **({"late": float(i)} if i > 50 else {})} for i in range(1, 101)]
    found = table(tmp_path / "m.jsonl", *(json.dumps(row) + "\n" for row in rows))
    np.testing.assert_array_equal(found["a"], [i / 7 for i in range(1, 101)])
    np.testing.assert_array_equal(found["late"][50:], np.arange(51, 101))
    assert np.isnan(found["late"][:50]).all()


def test_only_names_that_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text('{"step":0,"seed":5,"validation/all/pass@1":0.5,"samples":[{"x":1}]}\n')
    found = Columns(path, keep=lambda name: name.startswith("validation/"))
    found.read()
    assert found.names == ["validation/all/pass@1"]


def test_a_long_file_in_pieces_is_the_file_at_once(tmp_path: Path) -> None:
    run = long(tmp_path / "run", steps=5000, figures=5)
    whole = run / "metrics.jsonl"
    data, growing = whole.read_bytes(), Columns(tmp_path / "growing.jsonl")
    for end in (0, 1, 1000, 200_000, 200_001, len(data)):
        growing.path.write_bytes(data[:end])
        growing.read()
    at_once = Columns(whole)
    at_once.read()
    assert growing.rows == at_once.rows == 5000 and growing.generation == 0
    for name in at_once.names:
        np.testing.assert_array_equal(growing[name], at_once[name])


def test_a_glimpse_is_rows_from_all_over_the_file(tmp_path: Path) -> None:
    run = long(tmp_path / "run", steps=5000, figures=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":5001,"torn')
    table = Columns(run / "metrics.jsonl")
    seen = table.glimpse(100)
    assert table.rows == 0 and 90 < seen.rows < 300 and seen.broken == 0
    assert seen["step"][0] == 1 and seen["step"][-1] == 5000
    assert (np.diff(seen["step"]) > 0).all() and np.diff(seen["step"]).max() < 100
    table.read()
    np.testing.assert_array_equal(table["kl"][seen["step"].astype(int) - 1], seen["kl"])


def test_a_glimpse_of_little_is_all_of_it(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=10)
    assert Columns(run / "metrics.jsonl").glimpse(100).rows == 10
    assert Columns(tmp_path / "nothing").glimpse(100).rows == 0
