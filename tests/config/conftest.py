from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def compute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadPoolExecutor]:
    """A server's compute thread, in a folder with the models `model` and `other` and the template `shout.jinja`."""
    with pytest.MonkeyPatch.context() as patches, ThreadPoolExecutor(1) as pool:
        patches.chdir(tmp_path_factory.mktemp("server_keys"))
        tiny_model_folder("model")
        tiny_model_folder("other", seed=1)
        Path("shout.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!!!")
        yield pool
