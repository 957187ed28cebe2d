"""The file of `output=`: checked before the work begins, and written at its end."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import check_target
from birl.track.log import encode


def prepare(name: str) -> None:
    """Check that the file can be written, but do not create it, as `birl reproduce` takes an existing one for
    results. Raises `BirlError`."""
    path = Path(name).absolute()
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            check_target(path)
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def write(name: str, result: Mapping[str, Any]) -> None:
    """Write JSON, in which NaN is null. Raises `BirlError`."""
    path = Path(name).absolute()
    with _writing(path):
        check_target(path)
        new = path.with_name(path.name + ".new")  # a full disk must not cost an earlier result
        try:
            new.write_text(json.dumps(json.loads(encode(result, exact=True)), indent=1))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BirlError(f"output={path} cannot be written: {error.strerror or error}. Name another file.") from error
