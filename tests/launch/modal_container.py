"""One container of the stand-in for Modal: FUNCTION METHOD FOLDER VOLUME. Imports the app as Modal's would, calls the
function with the arguments of the call, and leaves what it gave, or why it failed, in FOLDER/result."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modal._serialization import deserialize, serialize

from birl.launch import modal_app
from birl.launch.modal_plan import ROOT


@contextmanager
def forward(port: int) -> Iterator[Any]:
    """No tunnel is needed on one machine, and there would be no TLS at its end."""
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}")


def main(name: str, method: str, folder: str, volume: str) -> None:
    modal_app.modal.forward = forward
    modal_app.ROOT = volume
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    args, options = deserialize((Path(folder) / "args").read_bytes(), None)
    for word in args:
        if isinstance(word, dict) and "place" in word:
            word["place"] = word["place"].replace(ROOT, volume, 1)
    thing = getattr(modal_app, name.removesuffix(".*"))
    function = getattr(thing(), method) if name.endswith(".*") else thing
    result = Path(folder) / "result"
    try:
        result.write_bytes(serialize(function.local(*args, **options)))
    except BaseException as error:
        result.write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
