"""Files that are empty, broken, too large or no files at all: refused, with the file and the line."""

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birl.config import schema
from birl.config.load import load
from birl.data.sources import read
from birl.errors import BirlError
from birl.preflight import check_data
from tests.data.written import ROWS, refused, write


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


@pytest.mark.parametrize("order", ["le", "be"])
def test_utf16_is_told_by_its_mark(tmp_path: Path, order: str) -> None:
    """Line 1 was shown with a NUL behind each letter."""
    (tmp_path / "a.csv").write_bytes("\ufeffprompt,answer\nx,1\n".encode(f"utf-16-{order}"))
    assert refused(tmp_path / "a.csv").endswith(
        "a.csv is UTF-16, as PowerShell's > and Excel's Unicode text are. Save it as UTF-8."
    )


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
        (r'{"prompt": "half \ud83d"}', "half of a surrogate pair"),
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
        ("prompt, answer\na, 1\n", "line 1: ' answer': a column's name must not begin or end with spaces"),
        ("prompt;answer\na;1\n", "line 1: the columns are separated by ';'"),
        ('prompt,answer\n"a,1\n', "broken CSV"),
    ],
)
def test_broken_csv(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert what in refused(tmp_path / "a.csv")


def test_wrong_rows_of_parquet_are_told_before_torch(tmp_path: Path) -> None:
    """They were after it: as `birl rl` itself reads them."""
    junk, strange, typed = (tmp_path / f"{name}.parquet" for name in ("junk", "strange", "typed"))
    junk.write_text("no parquet")
    write(strange, [{"frage": "What is 3 + 4?"}])
    write(typed, [{"prompt": [{"role": "user", "content": "Hi"}]}, {"prompt": [{"role": "user"}]}])
    for file, message in (
        (junk, "is not a readable parquet file"),
        (strange, r"has no column messages, prompt, question\. It has the columns frage"),
        (typed, "row 2: "),
    ):
        with pytest.raises(BirlError, match=f"{file.name}.* ?{message}"):
            check_data(load(schema.RL, [f"data.train={file}", "reward=code"]))
    check_data(load(schema.RL, [f"data.train={write(tmp_path / 'good.parquet')}"]))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_binary_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"a.{kind}")
    path.write_bytes(path.read_bytes()[:-20])
    message = refused(path)
    assert f"a.{kind}" in message and f"not a readable {kind} file" in message


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
    with pytest.raises(BirlError, match=r"rows\.py.*remove the \.py file"):
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
        # of an object in which a key is twice, datasets makes a row for each of its values
        ("a.jsonl", b'{"prompt": "a", "x": {"y": 1, "y": 2}}\n', "line 1: the key 'y' is there twice"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}\n', "line 2: the key 'prompt' is there twice"),
        ("a.json", b'[{"prompt": "a", "prompt": "b"}]', "line 1: the key 'prompt' is there twice"),
        ("a.json", b'{\n"prompt": "a",\n"prompt": "b"}', "line 1: the key 'prompt' is there twice"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else "",
)
def test_what_ends_or_holds_up_pyarrow_is_refused(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert what in refused(path)


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


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_changes_no_type_of_a_csv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """In plain Python all values are text; JSON has its types there, too."""
    import datasets

    def full(*_: object, **__: object) -> object:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if wrapped:
                raise RuntimeError("An error occurred while generating the dataset") from error
            raise

    monkeypatch.setattr(datasets, "load_dataset", full)
    (tmp_path / "a.csv").write_text("prompt,level\na,1\nb,2\n")
    said = refused(tmp_path / "a.csv")
    assert "cannot write its copy (No space left on device)" in said and "HF_DATASETS_CACHE" in said
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "level": 1}\n{"prompt": "b", "level": 2}\n')
    assert read(str(tmp_path / "a.jsonl"))[1]["level"] == 2


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


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        *((file, lambda b: b"") for file in ("*.arrow", "dataset_info.json")),
        *((file, lambda b: b[: len(b) // 2]) for file in ("*.arrow", "dataset_info.json")),
        *((file, lambda b: bytes(len(b))) for file in ("*.arrow", "dataset_info.json")),
        ("*.arrow", lambda b: b.replace(b"What is 3", b"What is 4")),
    ],
)
def test_a_damaged_copy_of_datasets_is_made_again(
    tmp_path: Path, name: str, pattern: str, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of a CSV file became text, a Parquet file that is good was called unreadable, and rows in which bytes had
    changed were trained."""
    from datasets.config import HF_DATASETS_CACHE

    write(tmp_path / name)
    assert list(read(str(tmp_path / name))) == ROWS and "made again" not in capsys.readouterr().out
    (copy,) = Path(HF_DATASETS_CACHE).rglob(pattern)
    data = copy.read_bytes()
    copy.unlink()  # the table of before is mapped
    copy.write_bytes(damage(data))
    if pattern == "*.arrow":
        os.utime(copy.parent / "dataset_info.json", (1, 1))  # clocks of file systems are coarse
    assert list(read(str(tmp_path / name))) == ROWS
    assert f"the copy of {tmp_path / name} in the cache of `datasets` was" in capsys.readouterr().out
    assert list(read(str(tmp_path / name))) == ROWS and "made again" not in capsys.readouterr().out
