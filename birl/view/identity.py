"""Which runs are the same but for their seed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from birl.track.runs import ALWAYS_OTHER

OWN = ("seed", "threads", *ALWAYS_OTHER)  # keys in which seeds of one configuration differ
OWN_SECTIONS = ("track.", "checkpoint.")


def family(run_id: str, config: Mapping[str, Any]) -> str:
    """The same for runs that differ in their seed, their folder and in what they report; a run whose configuration
    cannot be read is alone."""
    if not config:
        return run_id
    kept = {k: v for k, v in config.items() if k not in OWN and not k.startswith(OWN_SECTIONS)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]
