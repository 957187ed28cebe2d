"""Suggests keys for an unknown word: by its name in another system, or by its spelling."""

import difflib
import re
from pathlib import Path

from birl.config import peers
from birl.config.keys import SHORTHANDS, documentation, presets, written
from birl.config.schema import COMMANDS, Eval

#: plain words for what keys of ours have as longer or other names
WORDS = {
    **dict.fromkeys(("gpu", "gpus", "n_gpus", "num_gpus", "world_size"), "parallel.fsdp parallel.ddp"),
    **dict.fromkeys(("logdir", "output", "output_path", "out", "outdir", "out_dir", "workdir"), "run"),
    **dict.fromkeys(("seq_len", "context_length", "max_len", "max_model_len"), "model.max_length"),
    **dict.fromkeys(("async", "off_policy", "max_off_policy"), "rollout.max_staleness"),
    **{"precision": "model.dtype", "vllm": "engine.kind", "sglang": "engine.kind", "answer": "data.answer_column"},
    **{"step": "steps", "clip_range": "algorithm.clip_low algorithm.clip_high", "data.file": "data.train"},
    **{"algorithm.kl_beta": "algorithm.kl_coef", "ent_coef": "algorithm.entropy_coef"},
}
ROWS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # files of rows
FILES = (*ROWS, ".gguf")


def suggest(key: str, schema: type) -> str:
    """` Did you mean optimizer.lr?`, with the difference if the word is another system's; empty if no key is close."""
    result, theirs = nearest_keys(key, schema), peers.named(key)
    about = next(((row, one) for row, one in theirs if set(result) & {one, *row.keys}), None)
    if result:
        return f" Did you mean {' or '.join(result)}?{_differs(*about, schema) if about else ''}"
    for row, one in theirs:
        for other, its in COMMANDS.items():
            if keys := [k for k in ((one,) if one else row.keys) if k in documentation(its)]:
                return f" {row.peer}'s {peers.plain(key)} is {', '.join(keys)} of `birl {other}`."
    return f" {theirs[0][0].peer}'s word, without a key here: {_in_terminal(theirs[0][0].note)}." if theirs else ""


def _differs(row: peers.Row, one: str, schema: type) -> str:
    """Difference from the other system's key, of ours for `one` key; a note that equals the value of ours is its
    default."""
    if not row.note:
        return ""
    docs, note = [documentation(one) for one in (schema, *COMMANDS.values())], row.note
    if one in row.keys and note.count(", ") == len(row.keys) - 1:  # a note for each key
        note = note.split(", ")[row.keys.index(one)]
    keys = [one] if one in docs[0] else [key for key in row.keys if key in docs[0]]
    if any(key in its and _same(written(its[key].default), note) for key in keys for its in docs):
        ours = written(docs[0][keys[0]].default)  # the note may have another command's
        note = f"the default here is {note if _same(ours, note) else ours}"
    return f" ({row.peer}'s word: {_in_terminal(note)})"


def _same(ours: str, note: str) -> bool:
    try:
        return float(ours) == float(note)
    except ValueError:
        return ours == note


def _in_terminal(note: str) -> str:
    """Replace Markdown links to documentation pages by file names."""
    return re.sub(r"\[[^\]]*\]\(([^)]*)\)", r"docs/\1", note)


def nearest_keys(key: str, schema: type) -> list[str]:
    """At most three keys that `key` may mean: its name in another system, same last part, similar spelling, also of a
    section."""
    key = peers.plain(key)
    keys = list(documentation(schema))
    section, _, last = key.rpartition(".")
    same = [name for name in keys if name.rpartition(".")[2] == last]
    theirs = peers.named(key)
    if plain := [name for name in WORDS.get(key, "").split() if name in keys]:
        return plain
    if theirs and (section or not same):
        return _few(_keys(theirs, keys))  # may be empty: the message has the reason
    longer = [name for name in keys if section and name.startswith(f"{key}_")]
    longer += [n for n in keys if section and n.startswith(f"{section}.") and last.endswith(f"_{n.rpartition('.')[2]}")]
    if section and not same and not longer:  # lora.r, algorithm.beta: TRL's lora_r and beta
        words = (f"{section}_{last}", last)
        longer = [n for w in words for n in _keys(peers.named(w), keys) if n.startswith(f"{section}.")]
    result = [*same, *_keys(theirs, keys), *longer]
    if not result and len({one or row.keys for row, one in peers.ends_like(key)}) == 1:
        result = _keys(peers.ends_like(key), keys)
    if result or (result := _sections_like(key, keys, schema) or _spelt_like(key, keys)):
        return _few(result)
    words = [key, last] if any(name.startswith(f"{section}.") for name in keys) else [key]
    return _few([k for word in words for w in peers.spelt_like(word) for k in _keys(peers.named(w), keys)])


def _few(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))[:3]


def _sections_like(word: str, keys: list[str], schema: type) -> list[str]:
    """Keys that `word=...` may set, for a word similar to a section, as in `rewards=math`: the section's kind, its
    path, or a preset."""
    groups = {name.rpartition(".")[0]: name for name in keys if name.endswith(".kind")}
    groups |= {name: f"{name}.path" if f"{name}.path" in keys else name for name in presets(schema)}
    groups |= {name: key for name, key in SHORTHANDS.items() if key in keys}
    return [groups[name] for name in difflib.get_close_matches(word, groups, n=1, cutoff=0.85 if "." in word else 0.8)]


def _spelt_like(key: str, keys: list[str]) -> list[str]:
    """Keys with similar spelling; in an unknown section only very similar ones."""
    section, _, last = key.rpartition(".")
    ours = difflib.get_close_matches(section, {name.rpartition(".")[0] for name in keys}, n=1, cutoff=0.7)
    parts = {name: name.rpartition(".")[2] for name in keys}
    close = difflib.get_close_matches(last, list(parts.values()), n=3, cutoff=0.75 if ours or not section else 0.9)
    result = [name for part in close for name in keys if parts[name] == part]
    return [*[name for name in difflib.get_close_matches(key, keys, n=3, cutoff=0.7) if name in result], *result]


def _keys(theirs: list[tuple[peers.Row, str]], known: list[str]) -> list[str]:
    """Known keys of the names; for names of a whole row, all its keys."""
    one = [key for _, key in theirs if key in known]
    return one or [key for row, _ in theirs for key in row.keys if key in known]


def meant(word: str, schema: type) -> str:
    """The key that a file or a folder without a key may belong to."""
    path, keys = Path(word), documentation(schema)
    if path.is_dir():
        return f" For the model of that folder: model={word}."
    if path.is_file():
        if "data.train" not in keys:
            return f" For a model: model.path={word}."
        return f" For the data in that file: {'data.validation' if schema is Eval else 'data.train'}={word}."
    if path.suffix.lower() in FILES:
        return f" There is no file {word} here."
    return "" if "optimizer.lr" in keys else " There is no model or run of that name here."
