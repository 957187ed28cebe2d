"""Rows in files of every format."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birl.data.sources import read
from birl.errors import BirlError

ROWS = [{"prompt": "What is 3 + 4?", "answer": 7}, {"prompt": "Wie viel ist 2 mal 3?\nÄ", "answer": 6}]


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
