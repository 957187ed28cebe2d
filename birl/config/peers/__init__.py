"""Names of our keys in other systems: a table for each, as data, for hints on unknown keys, `--help WORD`,
`birl.Trainer` and the pages docs/from_*.md. Standard library only.

A line of a table: THEIR NAMES | OUR KEYS, or none | what differs | how `birl.Trainer` takes a value: `=` as it is, `-`
as nothing to do, or THEIRS=OURS pairs; without the last column it takes none. A name that ends in `.*` stands for a
section of theirs, wherever it is.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROLE = re.compile(r"^(actor_rollout_ref\.)?(ref|critic|teacher(\.train)?)\.")  # sections with the actor's keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Names with the same meaning. Without `keys`, `note` is the reason.

    Example: Row(peer="verl", names=("trainer.save_freq",), keys=("checkpoint.every",), note="10; 0 is only at the end")
    """

    peer: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    note: str = ""
    take: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One system. `tables`: rows by the title of their section on the page."""

    name: str
    version: str
    tables: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])


@cache
def peers() -> dict[str, Peer]:
    """All systems by the name of their file: "trl", "verl", ..."""
    return {path.stem: _read(path) for path in sorted(HERE.glob("*.toml"), key=_usual)}


def _usual(path: Path) -> tuple[int, str]:
    """Sort key: the systems that most users come from are first."""
    order = ("trl", "verl", "openrlhf", "areal", "rl2")
    return (order.index(path.stem) if path.stem in order else len(order)), path.stem


def _read(path: Path) -> Peer:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    peer = Peer(name=content["name"], version=content["version"])
    for table in content["table"]:
        peer.tables[table["title"]] = [_row(peer.name, line) for line in table["rows"].strip().splitlines()]
    return peer


def _row(peer: str, line: str) -> Row:
    names, keys, note, take, *_ = (*(cell.strip() for cell in line.split("|")), "", "")
    theirs, ours = tuple(names.split(", ")), tuple(filter(None, keys.split(", ")))
    return Row(peer=peer, names=theirs, keys=ours, note=note, take=take)


def rows() -> Iterator[Row]:
    return (row for peer in peers().values() for table in peer.tables.values() for row in table)


def plain(word: str) -> str:
    """A name in the form of the tables: also for OpenRLHF's --eps-clip and Hydra's ++actor.lr."""
    return word.lower().lstrip("-+~").replace("-", "_").strip()


@cache
def _index() -> tuple[dict[str, list[tuple[Row, str]]], dict[str, list[tuple[Row, str]]]]:
    """Rows by whole name, and by every dotted ending of one; each with our key for that name, if the row has as many
    keys as names."""
    whole: dict[str, list[tuple[Row, str]]] = {}
    endings: dict[str, list[tuple[Row, str]]] = {}
    for row in rows():
        for place, name in enumerate(row.names):
            key = row.keys[place] if len(row.keys) == len(row.names) else _alike(name, row.keys)
            short = name.partition(".")[2] if name[:1].isupper() else name  # SFTConfig.packing
            parts = short.lower().split(".")
            whole.setdefault(".".join(parts), []).append((row, key))
            for i in range(1, len(parts)):
                endings.setdefault(".".join(parts[i:]), []).append((row, key))
    return whole, endings


def _alike(name: str, keys: tuple[str, ...]) -> str:
    """lora.alpha for ds.lora.alpha: the only key whose last part is the end of the name, else ""."""
    flat = name.lower().replace(".", "_")
    result = [key for key in keys if flat.endswith(key.rpartition(".")[2])]
    return result[0] if len(result) == 1 and len(keys) > 1 else ""


def spelt_like(word: str) -> list[str]:
    """The most similar name in a table, if its last part is similar, too; else empty."""
    word = plain(word)
    last, close = word.rpartition(".")[2], difflib.get_close_matches(word, list(_index()[0]), n=3, cutoff=0.85)
    return [name for name in close if difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio() > 0.8][:1]


def named(word: str) -> list[tuple[Row, str]]:
    """The rows with this name, also without its first parts (`rollout.n`), each with our key for it, or "" if it stands
    for all keys of the row."""
    whole, endings = _index()
    rest = word = plain(word)
    result = whole.get(word) or endings.get(word) or _section(word, whole=True)
    while not result and "." in rest:  # a longer path, or another role's (critic.optimizer.eps)
        rest = rest.partition(".")[2]
        result = (whole.get(rest) or endings.get(rest) or []) if "." in rest else []
    actors = ROLE.sub("actor.", word)
    result = result or _section(word)
    return result if result or actors == word else named(actors)


def mentioned(word: str) -> list[tuple[Row, str]]:
    """The rows with a name that contains `word` as whole words between dots and underscores: batch_size in
    per_device_train_batch_size, gpu in n_gpus_per_node."""
    word = re.escape(plain(word))
    pattern = re.compile(rf"(?<![a-z]){word}s?(?![a-z])")
    return [hit for name, hits in _index()[0].items() if pattern.search(name) for hit in hits]


def _section(word: str, whole: bool = False) -> list[tuple[Row, str]]:
    """The rows of the innermost section (`profiler.*`) with the word in it, or if `whole`, at its begin."""
    names = [name for name in _index()[0] if name.endswith(".*") and f".{name[:-1]}" in f".{word}"]
    names = [name for name in names if not whole or word.startswith(name[:-1])]
    inner = max(names, key=lambda name: f".{word}".rfind(f".{name[:-1]}"), default="")
    return _index()[0][inner] if inner else []


def ends_like(word: str) -> list[tuple[Row, str]]:
    """The rows with a name whose last part is that of `word`."""
    whole, endings = _index()
    last = plain(word).rpartition(".")[2]
    return [*whole.get(last, []), *endings.get(last, [])]
