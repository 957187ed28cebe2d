from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from birl.models.load import cast, load_model
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield executor


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights, in bfloat16."""
    found = []
    for seed in (0, 1):
        folder = tiny_model_folder(tmp_path_factory.mktemp("m") / str(seed), seed=seed)
        cast(load_model(folder), torch.bfloat16).save_pretrained(folder)  # pyright: ignore
        found.append(folder)
    return found
