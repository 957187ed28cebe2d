"""Which key a word stands for that is none: by its name in another system, or by its spelling. Standard library
only."""

import difflib
from pathlib import Path

from birl.config import peers
from birl.config.help import documentation
from birl.config.schema import COMMANDS, Eval


def suggest(key: str, schema: type) -> str:
    """` Did you mean optimizer.lr?`, with what differs where the word is another system's; or nothing where no key is
    close."""
    found, theirs = nearest_keys(key, schema), peers.named(key)
    about = next((row for row, one in theirs if set(found) & {one, *row.keys}), None)
    if found:
        return f" Did you mean {' or '.join(found)}?{_differs(about) if about else ''}"
    for row, _ in theirs:
        for other, its in COMMANDS.items():
            if keys := [k for k in row.keys if k in documentation(its)]:
                return f" {row.peer}'s {row.names[0]} is {', '.join(keys)} of `birl {other}`."
    return f" {theirs[0][0].peer}'s word, without a key here: {theirs[0][0].note}." if theirs else ""


def _differs(row: peers.Row) -> str:
    """What is different from the other system's key; a note of one word is our default."""
    if not row.note:
        return ""
    return f" ({row.peer}'s word: {row.note if ' ' in row.note else f'the default here is {row.note}'})"


def nearest_keys(key: str, schema: type) -> list[str]:
    """At most three keys that `key` may stand for: its name in another system, same last part, similar spelling."""
    key = peers.plain(key)
    keys = list(documentation(schema))
    last = key.rpartition(".")[2]
    parts = {name: name.rpartition(".")[2] for name in keys}
    same = [name for name in keys if parts[name] == last]
    theirs = peers.named(key)
    if theirs and not same and not _keys(theirs, keys):
        return []  # known, and no key of this command: the message says why
    found = _keys(theirs, keys) if "." in key else [*same, *_keys(theirs, keys)]
    if not found and not same and len({row.keys for row, _ in peers.ends_like(key)}) == 1:
        found = _keys(peers.ends_like(key), keys)
    found = found or same
    if not found:
        found += difflib.get_close_matches(key, keys, n=3, cutoff=0.7)
        close = difflib.get_close_matches(last, list(parts.values()), n=3, cutoff=0.7)
        found += [name for part in close for name in keys if parts[name] == part]
    if not found:
        found = [k for near in peers.spelt_like(key) for k in _keys(peers.named(near), keys)]
    return list(dict.fromkeys(found))[:3]


def _keys(theirs: list[tuple[peers.Row, str]], known: list[str]) -> list[str]:
    """Those that the names stand for; where they stand for all keys of their rows, those."""
    one = [key for _, key in theirs if key in known]
    return one or [key for row, _ in theirs for key in row.keys if key in known]


def meant(word: str, schema: type) -> str:
    """Which key a file or a folder without one belongs to."""
    path, keys = Path(word), documentation(schema)
    if path.is_dir():
        return f" For the model of that folder: model={word}."
    if path.is_file():
        if "data.train" not in keys:
            return f" For a model: model.path={word}."
        return f" For the data in that file: {'data.validation' if schema is Eval else 'data.train'}={word}."
    return ""
