from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


@pytest.fixture(scope="session")
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield executor
