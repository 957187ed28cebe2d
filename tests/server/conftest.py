from pathlib import Path

import pytest

from tests.text.test_tools import QWEN
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template has tools."""
    return tiny_model_folder(tmp_path_factory.mktemp("m") / "tiny", template=QWEN)
