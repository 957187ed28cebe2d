"""The last collectives of a rank, from PyTorch's flight recorder: who waited for whom, and in what, when a run stopped.

`torchfrtrace` shows the same of the dumps that PyTorch itself writes for NCCL."""

import json
import os
from typing import Any

from torch._C import _distributed_c10d as c10d

KEPT = 200  # collectives that a rank remembers; recording one takes some microseconds


def record() -> None:
    """Before the first process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def last(count: int = 4) -> str:
    """A line for each of the newest collectives, the newest first; empty where nothing was recorded.

    Example: #812 gloo:all_reduce of [4096] float, not finished (default_pg)
    """
    dump = getattr(c10d, "_dump_fr_trace_json", None)  # private, so it may disappear
    entries = json.loads(dump()).get("entries", []) if dump else []
    return "\n".join(f"    {_line(entry)}" for entry in reversed(entries[-count:]))


def _line(entry: dict[str, Any]) -> str:
    sizes = " and ".join(str(size) for size in entry.get("input_sizes", [])[:3]) or "nothing"
    kinds = ", ".join(sorted({str(kind).lower() for kind in entry.get("input_dtypes", [])}))
    done = "" if entry.get("retired") else ", not finished"
    group = " ".join(str(word) for word in entry.get("process_group", [])[1:])
    name = entry.get("profiling_name", "collective")
    return f"#{entry.get('collective_seq_id', '?')} {name} of {sizes} {kinds}{done} ({group})"
