"""The file that `output=` names: looked at before the work begins, and written when it is done."""

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
    """Nothing is there before the results are: `birl reproduce` takes the file for them. Raises `BirlError` where it
    could not be written."""
    path = Path(name).absolute()
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            check_target(path)
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def write(name: str, result: Mapping[str, Any]) -> None:
    """As JSON, which has no NaN. Raises `BirlError`."""
    path = Path(name).absolute()
    with _writing(path):
        check_target(path)
        path.write_text(json.dumps(json.loads(encode(result, exact=True)), indent=1))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BirlError(f"output={path} cannot be written: {error.strerror or error}. Name another file.") from error
