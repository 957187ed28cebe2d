"""Code of users may change what belongs to the whole process; what is sampled and trained does not depend on it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undone() -> Iterator[None]:
    """Afterwards the current folder and the type of PyTorch's new tensors are what they were. For code that nothing
    else runs beside, as an import; otherwise tensors name their types and paths are absolute."""
    folder = os.getcwd()
    try:
        yield
    finally:
        os.chdir(folder)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(torch.float32)
