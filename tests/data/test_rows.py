import csv
import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birl.data.rows import given, pick, plain
from birl.data.sources import read
from birl.errors import BirlError

ROWS = [{"prompt": "What is 3 + 4?", "answer": 7}, {"prompt": "Wie viel ist 2 mal 3?\nÄ", "answer": 6}]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))  # pyright: ignore


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lower()
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


def refused(path: Path | str, **options: object) -> str:
    with pytest.raises(BirlError) as error:
        rows = read(str(path), **options)  # type: ignore[arg-type]
        for i in range(len(rows)):
            rows[i]
    return str(error.value)


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


def test_text_that_parquet_has_as_bytes_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "Ä\n".encode(), "image": b"\x89PNG\r\n"}])
    assert list(read(str(path))) == [{"prompt": "Ä\n", "image": "iVBORw0K"}]


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


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    assert f"Did you mean {tmp_path / 'train.jsonl'}?" in refused(tmp_path / "trian.jsonl")
    assert "folder" in refused(tmp_path / "nowhere" / "train.jsonl")


def test_unknown_type(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert "'.txt'" in refused(tmp_path / "a.txt") and ".parquet" in refused(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b" \n\n"),
        ("a.json", b"[]"),
        ("a.csv", b""),
        ("a.csv", b"prompt,answer\n"),
        ("a.parquet", b""),
    ],
)
def test_empty_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert name in message and ("is empty" in message or "has no rows" in message)


def test_empty_folder(tmp_path: Path) -> None:
    assert "no data files" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "no data files" in refused(tmp_path)


@pytest.mark.parametrize("before", [0, 1, 200_000])
def test_bytes_that_are_not_utf8(tmp_path: Path, before: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * before + b'{"prompt": "b\xff"}\n')
    message = refused(path)
    assert f"a.jsonl, line {before + 1}: not UTF-8 (byte 0xff" in message and "Save the file as UTF-8" in message


def test_bytes_that_are_not_utf8_in_csv_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt\na\nb\xff\n")
    assert "a.csv, line 3: not UTF-8" in refused(tmp_path / "a.csv")
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "a.parquet")
    assert "a.parquet, row 2 cannot be read: 'utf-8'" in refused(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "b", "answer":', "broken JSON"),
        ('{"prompt": "b}', "broken JSON"),
        ('{"prompt": "b"} x', "broken JSON"),
        ("[1, 2]", "a row is a JSON object"),
        ('"text"', "a row is a JSON object"),
        (r'{"prompt": "half \ud83d"}', "half of a character"),
    ],
)
def test_broken_json_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line + '\n{"prompt": "c"}\n')
    message = refused(path)
    assert "a.jsonl, line 3: " in message and what in message and line in message


def test_broken_json_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n {"prompt": "a"},\n {"prompt": b}\n]')
    assert "a.json, line 3: broken JSON" in refused(path)
    path.write_text('[{"prompt": "a"}, 7]')
    assert "a.json, row 2" in refused(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("prompt,answer\na,1\nb,c,2\n", "line 3: 3 fields, but the header has 2"),
        ("prompt,answer\na\n", "line 2: 1 fields"),
        ("prompt,prompt\na,1\n", "line 1: the header"),
        (",prompt\n0,a\n", "to_csv(FILE, index=False)"),
        ("prompt, answer\na, 1\n", "line 1: ' answer': a column's name has no spaces"),
        ("prompt;answer\na;1\n", "line 1: the columns are separated by ';'"),
        ('prompt,answer\n"a,1\n', "broken CSV"),
    ],
)
def test_broken_csv(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert what in refused(tmp_path / "a.csv")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_binary_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"a.{kind}")
    path.write_bytes(path.read_bytes()[:-20])
    message = refused(path)
    assert f"a.{kind}" in message and f"no readable {kind} file" in message


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


def test_torch_is_not_needed() -> None:
    import subprocess

    code = (
        "import sys, birl.data.sources, birl.data.tasks, birl.data.stream; assert 'datasets' not in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_text_beside_lists_stays_text(tmp_path: Path) -> None:
    """datasets reads a column of text and lists as JSON, and "7." then becomes a number."""
    rows = [{"chosen": "7."}, {"chosen": [{"role": "user", "content": "Hi"}]}, {"chosen": "0.50"}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["chosen"] for row in read(str(tmp_path / "mixed.jsonl"))] == [row["chosen"] for row in rows]


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "a", "x": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
        "[" * 100_000,
        "[\n" * 100_000,
        '{"prompt": "a", "x":\n' + '{"}":\n' * 100_000,
        '{"prompt": "a", "x": [\n' + '"]", [\n' * 100_000,
    ],
)
def test_data_nested_too_deep_is_refused_by_its_line(tmp_path: Path, kind: str, content: str) -> None:
    path = tmp_path / f"a{kind}"
    path.write_text('{"prompt": "fine"}\n' + content + "\n" if kind == ".jsonl" else content)
    with pytest.raises(BirlError, match=r"a\.jsonl?, line \d+: nested deeper than 64"):
        read(str(path))


def test_brackets_in_texts_nest_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": "[" * 1000 + '"\\' + "{" * 1000, "answer": "]" * 70}] * 3
    for name in ("a.jsonl", "a.json"):
        assert len(read(str(write(tmp_path / name, rows)))) == 3


def test_a_program_beside_the_data_is_named_and_not_run(tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl")
    (tmp_path / "rows/rows.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')")
    with pytest.raises(BirlError, match=r"rows\.py.*move the \.py file away"):
        read(str(tmp_path / "rows"))
    assert not (tmp_path / "harm").exists()


def test_a_pipe_in_a_data_folder_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    os.mkfifo(tmp_path / "README.md")
    with pytest.raises(BirlError, match=r"README\.md cannot be read: it is a named pipe"):
        read(str(tmp_path))


@pytest.mark.parametrize("text", ["a: [\n", "\x00\x01", "- 1"])
def test_a_description_of_a_data_folder_that_is_no_yaml_is_told(tmp_path: Path, text: str) -> None:
    write(tmp_path / "train.jsonl")
    (tmp_path / ".huggingface.yaml").write_text(text)
    with pytest.raises(BirlError, match=str(tmp_path)):
        read(str(tmp_path))


LONG = {"7" * 5000: 0, "-" + "7" * 25: 0, f'"{"7" * 5000}"': 1, "1e30": 1, "0.1234567890123456789012": 1, "12345678": 1}


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
def test_an_integer_beyond_64_bits_is_refused_where_it_is_no_text(tmp_path: Path, text: str) -> None:
    """pyarrow reads one of 5,000 digits as infinity, and rounds shorter ones."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "x", "answer": {text}}}\n')
    if LONG[text]:
        assert read(str(path))[0]["answer"] == json.loads(text)
    else:
        with pytest.raises(BirlError, match=r"line 1: an integer of .* digits would be rounded"):
            read(str(path))


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", b" \n null", "line 2: a row is a JSON object"),  # of which pyarrow ends the process
        ("a.jsonl", b'null\n{"prompt": "a"}\n', "line 1: a row is a JSON object"),
        ("a.jsonl", ("{" + ",".join(f'"k{i}": 1' for i in range(4097)) + "}\n").encode(), "4,097 columns"),
        ("a.csv", (",".join(f"k{i}" for i in range(4097)) + "\n").encode(), "4,097 columns"),
        ("a.jsonl", gzip.compress(b'{"prompt": "a"}'), "is compressed (gzip). Decompress it first"),
        ("a.csv.gz", gzip.compress(b"prompt"), "is compressed (gzip)"),
        ("a.json", b'[[{"prompt": "a"}]]', "row 1: a row is a JSON object"),  # datasets reads a column `text`
    ],
    ids=["null", "null first", "columns", "columns of CSV", "gzip", "CSV in gzip", "lists"],
)
def test_what_ends_or_holds_up_pyarrow_is_refused(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert what in refused(path)


def test_absent_columns_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that each have a column of their own: `datasets` would make all columns of each row."""
    path, seen = write(tmp_path / "a.jsonl", [{"prompt": "a", f"k{i}": i} for i in range(300)]), []
    monkeypatch.setattr("birl.data.rows.plain", lambda value: seen.append(value) or value)
    rows = list(read(str(path)))
    assert len(seen) == 600
    assert rows[7] == {"prompt": "a"} | {f"k{i}": 7 if i == 7 else None for i in range(300)}


@pytest.mark.parametrize("kind", ["pipe", "a.jsonl", "/dev/zero", "/proc/self/pagemap"])
def test_what_is_no_file_is_named_and_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)
    assert "a.jsonl cannot be read: " in refused(path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def slow(*args: object, load=datasets.load_dataset, **keys: object) -> object:
        table = load(*args, **keys)
        path.write_text('{"prompt": "c"}\n')
        return table

    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", slow)
    assert "changed while it was read" in refused(path)


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    assert "a.parquet has no rows" in refused(write(tmp_path / "a.parquet", []))


@pytest.mark.parametrize("decoded", [False, True])
def test_a_small_parquet_file_that_comes_to_far_more_is_refused(
    decoded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 10_000]))
    table = pa.table({"prompt": text.dictionary_decode() if decoded else text})
    pq.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setattr("birl.data.files.MOST", 2**20)
    assert "a.parquet: its first" in refused(tmp_path / "a.parquet")
