"""birl: reinforcement-learning post-training for language models.

Importing this package is cheap: nothing heavy (torch, transformers) loads before it is used.
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["BirlError", "Trainer", "__version__"]

# libgomp reads this once, when torch is imported. Two threads that wait actively for about a millisecond are as fast as
# they can be on a quiet machine (with a tenth of that, half as fast), and give the core up where others want it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from birl.errors import BirlError

if TYPE_CHECKING:
    from birl.loops.trainer import Trainer


def __getattr__(name: str) -> object:
    if name == "Trainer":
        from birl.loops.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'birl' has no attribute {name!r}")
