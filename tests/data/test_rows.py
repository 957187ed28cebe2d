"""Rows of every source: files, folders with splits and subsets, the hub, objects of Python."""

import decimal
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birl.data.rows import given, pick, plain
from birl.data.sources import read
from birl.errors import BirlError
from tests.data.written import ROWS, refused, write


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.arrow", "A.JSONL"])
def test_every_format(tmp_path: Path, name: str) -> None:
    rows = read(str(write(tmp_path / name)))
    assert list(rows) == ROWS
    assert rows.columns == ("prompt", "answer")
    assert rows.id(1) == f"{name}:1" and rows.where(1) == f"{tmp_path / name}, row 2" and rows.stem(0) == name[0]


def test_json_lines_with_mark_blank_lines_and_windows_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [row["prompt"] for row in read(str(path))] == ["a", "b"]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl"))
    assert list(read(path, limit=1)) == ROWS[:1]
    assert len(read(path, limit=99)) == 2


def test_folder_with_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "test.jsonl", ROWS[:1])
    assert len(read(str(tmp_path))) == 2
    assert len(read(f"test@{tmp_path}")) == 1
    assert len(read(str(tmp_path), splits=("validation", "test", "train"))) == 1
    assert "Did you mean test@" in refused(f"tset@{tmp_path}")
    message = refused(tmp_path, splits=("dev",))
    assert "train, test" in message and "train@" in message


def test_folder_of_shards_knows_the_file_of_each_row(tmp_path: Path) -> None:
    write(tmp_path / "data/train-00000-of-00002.parquet")
    write(tmp_path / "data/train-00001-of-00002.parquet", ROWS[:1])
    rows = read(str(tmp_path))
    assert [rows.id(i) for i in range(3)] == [
        "train-00000-of-00002.parquet:0",
        "train-00000-of-00002.parquet:1",
        "train-00001-of-00002.parquet:0",
    ]
    assert rows.stem(2) == "train"


def test_folder_with_one_split_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path / "test.csv")
    assert len(read(str(tmp_path), splits=("train",))) == 2


def test_folder_with_files_of_other_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"prompt": "b", "answer": "x"}])
    assert list(read(str(tmp_path))) == [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "x"}]


def test_folder_with_subsets(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: a.jsonl\n"
        "- config_name: socratic\n  data_files: b.jsonl\n---\n"
    )
    assert len(read(str(tmp_path), subset="main")) == 2
    assert len(read(str(tmp_path), subset="socratic")) == 1
    message = refused(tmp_path)
    assert "socratic" in message and "data.subset" in message


def test_subset_is_for_sources_that_have_some(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    assert len(read(str(tmp_path), subset="main")) == 2


def test_saved_dataset(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one", num_proc=1)
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(tmp_path / "both")  # pyright: ignore
    assert list(read(str(tmp_path / "one"))) == ROWS
    assert list(read(f"test@{tmp_path / 'both'}")) == ROWS[:1]


def test_path_that_contains_an_at(tmp_path: Path) -> None:
    assert len(read(str(write(tmp_path / "me@home" / "a.jsonl")))) == 2
    assert len(read(f"train@{tmp_path / 'me@home'}")) == 2


def test_split_of_a_single_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert len(read(f"train@{path}")) == 2
    assert "one file has no splits" in refused(f"test@{path}")
    assert "split@path" in refused("@a.jsonl")


def test_changed_file_is_read_again_even_with_the_old_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "one"}])
    before = path.stat()
    assert read(str(path))[0]["prompt"] == "one"
    write(path, [{"prompt": "two"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(str(path))[0]["prompt"] == "two"


def test_columns_of_mixed_types(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": "x"}, {"prompt": "c", "answer": None}]
    assert [row["answer"] for row in read(str(write(tmp_path / "a.jsonl", rows)))] == [7, "x", None]
    nested = [{"extra_info": {"answer": 1, "pass@k": 3}}, {"extra_info": {"answer": [2], "other": "y"}}]
    infos = [row["extra_info"] for row in read(str(write(tmp_path / "b.json", nested)))]
    assert infos[0]["answer"] == 1 and infos[0]["pass@k"] == 3 and infos[1]["answer"] == [2]


def test_type_that_changes_late_in_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}] * 15_000 + [{"prompt": "b", "answer": "x"}]
    for name in ("a.csv", "a.jsonl"):
        assert read(str(write(tmp_path / name, rows)))[15_000]["answer"] == "x"


def test_text_that_looks_like_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "When?", "answer": "2024-05-01"}])
    assert read(str(path))[0]["answer"] == "2024-05-01"
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\nNone,NA\n"two, with\nbreak",null\n')
    assert list(read(str(path))) == [
        {"prompt": "None", "answer": "NA"},
        {"prompt": "two, with\nbreak", "answer": "null"},
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_csv(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(end.join(["prompt,answer", f'"two{end}lines",007', "one,08", ""]).encode())
    assert list(read(str(path))) == [{"prompt": f"two{end}lines", "answer": "007"}, {"prompt": "one", "answer": "08"}]
    path.write_bytes(end.join(["prompt,answer", "one,2", "one,2,3"]).encode())
    with pytest.raises(BirlError, match="line 3: 3 fields, but the header has 2"):
        read(str(path))


def test_digits_with_zeros_in_front_are_no_number(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer,level\n3 in binary,0011,1\n6 in binary,110,0\nten,1010,10\n")
    result = [(row["answer"], row["level"]) for row in read(str(path))]
    assert result == [("0011", 1), ("110", 0), ("1010", 10)]


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("a.csv", "n,id\n12345678901234567,12345678901234567\n0.5,2\n", ["12345678901234567", "0.5"]),
        (
            "a.jsonl",
            '{"n": 12345678901234567, "id": 12345678901234567}\n{"n": 0.5, "id": 2}\n',
            [12345678901234567, 0.5],
        ),
    ],
)
def test_an_integer_beside_a_fraction_is_not_rounded(tmp_path: Path, name: str, text: str, values: list) -> None:
    (tmp_path / name).write_text(text)
    assert [row["n"] for row in read(str(tmp_path / name))] == values
    assert [row["id"] for row in read(str(tmp_path / name))] == [12345678901234567, 2]  # an integer still


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a.json", '[{"x": 0.30000000000000004}]', 0.30000000000000004),  # datasets has ten digits of a list's
        ("a.json", '[{"x": NaN}]', float("nan")),
        ("a.jsonl", '{"x": [9007199254740993, 0.5]}\n' * 2, [9007199254740993, 0.5]),
        ("a.json", '{\n"x": [1, "a"]\n}\n', [1, "a"]),
        ("a.csv", "x,y\n12345678901234567890.5,1\n", "12345678901234567890.5"),
    ],
    ids=["list", "NaN", "integer in a list", "one object", "CSV"],
)
def test_numbers_keep_their_digits(tmp_path: Path, name: str, text: str, value: object) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert repr(read(str(path))[0]["x"]) == repr(value)


def test_text_that_parquet_has_as_bytes_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "Ä\n".encode(), "image": b"\x89PNG\r\n"}])
    assert list(read(str(path))) == [{"prompt": "Ä\n", "image": "iVBORw0K"}]


def test_data_beside_many_pictures_is_to_be_named(tmp_path: Path) -> None:
    """`datasets` makes of it a folder of pictures: it was said to hold no data files."""
    write(tmp_path / "rows.jsonl")
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"\x89PNG\r\n")
    assert f"Name the data files: {tmp_path / 'rows.jsonl'}" in refused(tmp_path)


def test_files_that_a_folder_leaves_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "more/b.csv")
    assert len(read(str(tmp_path))) == 2
    assert "not read, as they are of another format: more/b.csv" in capsys.readouterr().out
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert "c.jsonl.gz is compressed (gzip)" in refused(tmp_path)


def test_values_are_plain() -> None:
    import datetime
    import decimal

    import numpy as np

    value = {"a": np.arange(2), "b": b"\x00", "c": (1, np.float64(0.5)), "d": datetime.date(2024, 5, 1), 1: None}
    assert plain(value) == {"a": [0, 1], "b": "AA==", "c": [1, 0.5], "d": "2024-05-01", "1": None}
    assert plain(decimal.Decimal("7.00")) == 7 and plain(decimal.Decimal("0.5")) == 0.5
    json.dumps(plain(value))


def test_pick() -> None:
    row = {"extra_info": {"answer": "7"}, "a.b": 1, "x": 2}
    assert pick(row, "extra_info.answer") == "7" and pick(row, "a.b") == 1
    assert pick(row, "x.y") is None and pick(row, "nothing.here") is None


def test_given_rows() -> None:
    from datasets import Dataset, DatasetDict

    assert list(given(ROWS, "train")) == ROWS
    assert list(given(Dataset.from_list(ROWS).with_format("numpy"), "train")) == ROWS
    assert given([{"a": 1}, {"b": 2}], "train")[0] == {"a": 1, "b": None}
    for wrong, hint in (
        (["text"], "row 1"),
        (7, "int"),
        ([], "no rows"),
        (DatasetDict(x=Dataset.from_list(ROWS)), "splits x"),  # pyright: ignore
        (Dataset.from_list(ROWS).to_pandas(), r'DATA\.to_dict\("records"\)'),
        (Dataset.from_list(ROWS).to_iterable_dataset(), r"list\(DATA\)"),
    ):
        with pytest.raises(BirlError, match=hint):
            given(wrong, "train")


def test_bars_and_log_level_are_left_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    before = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    read(str(write(tmp_path / "a.jsonl")))
    refused(write(tmp_path / "b.jsonl", []))
    assert (datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()) == before
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    from huggingface_hub import HfApi

    def nobody(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(HfApi, "dataset_info", nobody)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aritmetic").mkdir()
    message = refused("openai/gsm8k")
    assert "no such file or folder here" in message and "hub cannot be reached" in message
    assert "Did you mean aritmetic?" in refused("arithmetic")
    assert datasets.config.HF_HUB_OFFLINE is False or os.environ.get("HF_HUB_OFFLINE")  # pyright: ignore


def test_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub itself is not asked: a folder answers for it."""
    import datasets
    from huggingface_hub import HfApi

    write(tmp_path / "train.jsonl")
    write(tmp_path / "test.jsonl", ROWS[:1])
    builder, load = datasets.load_dataset_builder, datasets.load_dataset
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, subset: builder(str(tmp_path)))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: load(str(tmp_path), split=split))
    rows = read("openai/gsm8k", splits=("validation", "test", "train"), subset="main")
    assert list(rows) == ROWS[:1] and rows.id(0) == "test@openai/gsm8k:0" and rows.stem(0) == "gsm8k"
    assert len(read("train@openai/gsm8k")) == 2


def test_text_beside_lists_stays_text(tmp_path: Path) -> None:
    """datasets reads a column of text and lists as JSON, and "7." then becomes a number."""
    rows = [{"chosen": "7."}, {"chosen": [{"role": "user", "content": "Hi"}]}, {"chosen": "0.50"}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["chosen"] for row in read(str(tmp_path / "mixed.jsonl"))] == [row["chosen"] for row in rows]


def test_absent_columns_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that each have a column of their own: `datasets` would make all columns of each row."""
    path, seen = write(tmp_path / "a.jsonl", [{"prompt": "a", f"k{i}": i} for i in range(300)]), []
    monkeypatch.setattr("birl.data.rows.plain", lambda value: seen.append(value) or value)
    rows = list(read(str(path)))
    assert len(seen) == 600
    assert rows[7] == {"prompt": "a"} | {f"k{i}": 7 if i == 7 else None for i in range(300)}


def test_numbers_of_few_bits_are_those_that_were_meant(tmp_path: Path) -> None:
    """0.1 of 32 bits is 0.10000000149 in 64; a decimal that no float holds stays exact, as text."""
    half, single = np.float16, np.float32
    nested = pa.struct([("answer", pa.list_(pa.float32())), ("other", pa.float64())])
    table = {
        "answer": pa.array([0.1, 1 / 3], pa.float32()),
        "half": pa.array([half(0.1), half(2.5)], pa.float16()),
        "double": [1 / 3, 0.1],
        "deep": pa.array([{"answer": [0.1, None], "other": 1 / 3}] * 2, nested),
        "money": pa.array([decimal.Decimal("0.10"), decimal.Decimal("12345678901234567890.12")], pa.decimal128(30, 2)),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    first, second = read(str(tmp_path / "a.parquet"))
    deep = {"answer": [0.1, None], "other": 1 / 3}
    assert first == {"answer": 0.1, "half": 0.1, "double": 1 / 3, "deep": deep, "money": 0.1}
    assert second["answer"] == 0.33333334 and second["money"] == "12345678901234567890.12"
    (own,) = given([{"one": single(0.1), "many": np.array([0.1, 2], single)}], "rows")
    assert own == {"one": 0.1, "many": [0.1, 2.0]}


def test_patterns_are_refused_with_what_they_match(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "d" / name)
    told = refused(tmp_path / "d/*.jsonl")
    assert "patterns are not expanded" in told and f"[{tmp_path}/d/a.jsonl,{tmp_path}/d/b.jsonl]" in told
    assert "No file matches" in refused(tmp_path / "d/*.csv")
    write(tmp_path / "d" / "[x].jsonl")  # a name as any other
    assert len(read(str(tmp_path / "d/[x].jsonl"))) == 2
