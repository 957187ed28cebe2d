"""Where things are kept that can be made again: $BIRL_CACHE, or ~/.cache/birl."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of them, such as "models"; it may not exist yet."""
    return Path(os.environ.get("BIRL_CACHE") or Path.home() / ".cache" / "birl") / kind
