"""config.json of a model that is written: what transformers writes, and what it would leave out of the one that was
read."""

import json
from pathlib import Path
from typing import Any

from birl.regular import read_json

NAME = "config.json"
#: of the weights that were read, or of the place where they were
LEFT_OUT = {"quantization_config", "compression_config", "_name_or_path", "_attn_implementation"}


def save_config(config: Any, folder: Path, source: Path | None) -> None:
    """`source`: the folder whose config.json was read. Its keys that transformers drops or renames are written, too:
    older versions of it and other programs read rope_theta, rope_scaling and torch_dtype, and would take defaults."""
    told = None if source is None else source / NAME
    old = read_json(told) if told is not None and told.is_file() else {}
    config.save_pretrained(folder)
    new = with_keys(read_json(folder / NAME), old)
    (folder / NAME).write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


def with_keys(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """`new`, and keys of `old` that are not there; so within the configs of text and vision."""
    result = dict(new)
    for key, value in old.items():
        if key == "torch_dtype":
            result[key] = new.get("dtype", value)
        elif key not in new and key not in LEFT_OUT:
            result[key] = value
        elif key.endswith("_config") and isinstance(value, dict) and isinstance(new.get(key), dict):
            result[key] = with_keys(new[key], value)
    return result
