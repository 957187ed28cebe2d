"""`birl serve` over a tiny model: `python -m tests.server.app FOLDER PORT SECONDS`, the last being how much longer each
step of the engine takes."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from birl.engine.engine import EmbeddedEngine
from birl.engine.steps import Steps
from birl.models.load import cast, load_model, load_tokenizer
from birl.server.serve import run
from tests.server.running import config


def tiny_engine(folder: Path, dtype: torch.dtype = torch.bfloat16) -> EmbeddedEngine:
    """What the server has, in this process."""
    model = cast(load_model(folder), dtype).requires_grad_(False)
    compute = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    keys: dict[str, Any] = {"end_ids": frozenset({2}), "context": 512, "compute": compute, "kv_cache_gb": 0.01}
    return EmbeddedEngine(model, load_tokenizer(folder), draft_rows=0, **keys)


if __name__ == "__main__":
    step, seconds = Steps.step, float(sys.argv[3])
    Steps.step = lambda self: (time.sleep(seconds), step(self))[1]  # type: ignore[method-assign]
    run(config(Path(sys.argv[1]), port=int(sys.argv[2])))
