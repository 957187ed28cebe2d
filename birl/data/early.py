"""Errors in rows, reported before torch is imported: small local files are read in plain Python."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.decided import teachers_of
from birl.data.files import FORMATS, check_readable
from birl.data.forms import pair_form, text_form
from birl.data.messages import Shown
from birl.data.parse import check_json, parse_csv, parse_json
from birl.data.rows import Rows, part
from birl.data.sources import check_place
from birl.data.tasks import Tasks, reader_of, teacher_named
from birl.errors import BirlError
from birl.text.parts import Finder

SIZE = 2**21  # bytes of a file that is read
ROWS = 1000


def check_data(config: Any) -> None:
    """The files of data.train and data.validation, and their first rows, as `config` would read them. Raises
    `BirlError`."""
    data = config.data
    for paths, limit in ((data.train, data.max_samples), (data.validation, data.max_validation_samples)):
        for path in paths:
            check_place(path)
            local = Path(path).expanduser()
            if local.is_dir() and not any(p.suffix.lower() in FORMATS for p in local.rglob("*")):
                raise BirlError(f"The folder {path} holds no data files ({' '.join(FORMATS)}).")
            if local.is_file() and (table := _parsed(local)) is not None:
                _check(
                    Rows(str(local), [part(local.name, local.stem, table, str(local))], limit),
                    config,
                    paths is data.train,
                )


def _parsed(path: Path) -> list[dict[str, Any]] | None:
    kind = check_readable(path)
    if path.stat().st_size > SIZE or kind not in ("json", "csv"):
        return None
    if kind == "csv":
        return list(parse_csv(path))
    check_json(path)
    return list(parse_json(path))


def _check(rows: Rows, config: Any, taught: bool) -> None:
    first = range(min(len(rows), ROWS))
    if isinstance(config.data, schema.Data):
        tasks = Tasks(
            rows, replace(reader_of(rows, config.data, True, tuple(config.model.picture_hosts)), offline=True)
        )
        names = teachers_of(config) if taught and isinstance(config, schema.RL) and config.algorithm.teachers else {}
        for i in first:
            task = tasks[i]
            if names:
                teacher_named(task, config.algorithm.teacher_column, names, rows.where(i))
        return
    if isinstance(config.data, schema.Texts):
        form = text_form(rows, config.data)
    else:
        form = pair_form(rows, config.data, getattr(config, "preference", None))
    for i in first:
        finder = Finder(folder=rows.folder(i), hosts=tuple(config.model.picture_hosts), offline=True)
        form.read(rows[i], rows.where(i), Shown.of(rows[i], finder, rows.where(i)))
