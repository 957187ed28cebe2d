"""A disk without room, for the processes of a test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file can grow beyond this; Python ignores the signal, so writing raises OSError as on a full disk.

    What is imported meanwhile leaves no bytecode: CPython before 3.14 would keep the part of it that fits, and the next
    process could not import that module."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode
