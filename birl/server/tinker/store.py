"""Persistent state of a service, from which a killed one continues.

    sessions/ID.json                      owner, time, metadata
    samplers/ID.json                      weights of a sampling session
    runs/ID/run.json                      an adapter in training: its owner, base and shape
    runs/ID/state.safetensors             the newest snapshot: masters, moments, gradients; up to which request
    runs/ID/journal                       requests accepted since, in order of arrival
    runs/ID/answers/SEQ                   answers of requests before the snapshot
    runs/ID/{weights,sampler_weights,external_weights}/NAME/   checkpoints
    audit.jsonl                           log of events

All files are complete: a file or folder is written under another name, and renamed. A request is in the journal before
its client gets the acceptance; a record truncated by a kill was not accepted. Files damaged otherwise are skipped with
a warning, and left in place.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from birl.errors import BirlError, first_line
from birl.regular import check, check_target, clear, open_regular, parse_json, read_bytes, read_json
from birl.server.tinker.futures import Answer

ID = re.compile(r"[0-9a-f]{32}(:(train|sample):[0-9]{1,12})?")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
OLD = "~old.partial"  # end of the name of a checkpoint that is replaced; no checkpoint has such a name
UNNAMED = re.compile(r"session-[0-9]{1,12}")  # names of checkpoints that were saved without one
log = logging.getLogger(__name__)
KILLED = "killed"  # kind of a record: a rank was killed in the pass of the request of this number
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@dataclass(frozen=True, slots=True)
class Record:
    """A request in the journal."""

    seq: int
    kind: str
    body: bytes


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint's metadata. `expires`: seconds since 1970, or None."""

    run: str
    kind: str  # one of KINDS
    name: str
    owner: str
    made: float
    size: int = 0
    expires: float | None = None
    public: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # base, rank, parts, steps

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


READER = TypeAdapter(Checkpoint)


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.writing = threading.Lock()  # lock of journals: snapshots shorten them in another thread
        check_target(root / "audit.jsonl")
        for name in ("sessions", "samplers", "runs"):
            (root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in list((root / name).glob("**/*.partial")):  # of a killed process
                before = left.with_name(left.name.removesuffix(OLD))
                if before != left and not before.exists():  # killed between the two renames of `save`
                    left.rename(before)
                clear(left)
        self.known = {c.path: c for c in self._read()}  # checkpoints by path: each save looks at all of its owner's

    def write(self, kind: str, id: str, values: Mapping[str, Any]) -> None:
        """Write an item. kind: sessions | samplers."""
        replace(self.root / kind / f"{file_of(id)}.json", json.dumps(values).encode())

    def remove(self, kind: str, id: str) -> None:
        """Remove an item. kind: sessions | samplers."""
        (self.root / kind / f"{file_of(id)}.json").unlink(missing_ok=True)

    def files(self, kind: str) -> Iterator[tuple[str, Path]]:
        """Ids and files of all items. kind: sessions | samplers | runs."""
        for file in sorted((self.root / kind).glob("*/run.json" if kind == "runs" else "*.json")):
            name = file.parent.name if kind == "runs" else file.stem
            if ID.fullmatch(id_of(name)):
                yield id_of(name), file

    def run(self, id: str) -> Path:
        return self.root / "runs" / file_of(id)

    def make_run(self, id: str, values: Mapping[str, Any]) -> None:
        folder = self.run(id)
        (folder / "answers").mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(folder / "run.json", json.dumps(values).encode())

    def remove_state(self, id: str) -> None:
        """Remove a run's state, except run.json and its checkpoints."""
        folder = self.run(id)
        for name in ("journal", "state.safetensors"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "answers", ignore_errors=True)

    def append(self, id: str, record: Record) -> None:
        """Journal a request. Raises `OSError` if the disk is full."""
        with self.writing:
            append(self.run(id) / "journal", framed(record))

    def journal(self, id: str, size: int | None = None) -> list[Record]:
        """All complete records, or those in the first `size` bytes. Without `size` a truncated record at the end is
        removed; if one is damaged otherwise, it and all after it are kept in journal.damaged."""
        path, result, good, whole = self.run(id) / "journal", [], 0, size is None
        if not path.exists():
            return []
        size = path.stat().st_size if size is None else size
        with open_regular(path) as file:
            while file.tell() < size and (line := file.readline()):
                try:
                    head = parse_json(line)
                    body = file.read(head["size"] if 0 <= head["size"] <= size else size)
                    if len(body) != head["size"] or zlib.crc32(body) != head["crc"] or file.read(1) != b"\n":
                        break
                    result.append(Record(int(head["seq"]), str(head["kind"]), body))
                except (ValueError, KeyError, TypeError):
                    break
                good = file.tell()
            if whole and good < size and file.read(1):  # a truncated record would be the last one
                log.warning("%s is damaged at byte %s: requests behind it are left out.", path, good)
                shutil.copyfile(path, path.with_name("journal.damaged"))
        if whole:
            os.truncate(path, good)
        return result

    def snapshot(self, id: str, state: Mapping[str, Tensor], done: int, about: Mapping[str, Any],
                 answers: Mapping[int, Answer]) -> None:  # fmt: skip
        """Write the results of requests up to `done`: answers first, then the state, then the shortened journal. After
        a kill in between, the newer state counts, and older records of the journal are skipped."""
        folder = self.run(id)
        for seq, answer in answers.items():
            head = json.dumps({"media": answer.media_type, "failed": answer.failed}).encode()
            replace(folder / "answers" / str(seq), head + b"\n" + answer.body)
        write_tensors(folder / "state.safetensors", state, {"done": done, **about})
        journal = folder / "journal"
        with self.writing:
            size = journal.stat().st_size if journal.exists() else 0
        left = b"".join(framed(r) for r in self.journal(id, size) if r.seq > done)  # requests are accepted meanwhile
        with self.writing:
            if journal.exists():
                with open_regular(journal) as file:
                    file.seek(size)
                    left += file.read()
            replace(journal, left)

    def load_snapshot(self, id: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        path = self.run(id) / "state.safetensors"
        return read_tensors(path) if path.exists() else None

    def snapshot_of(self, id: str) -> int:
        """Number of the last request in the snapshot; -1 without one."""
        path = self.run(id) / "state.safetensors"
        return int(read_about(path)["done"]) if path.exists() else -1

    def answers(self, id: str) -> dict[int, Answer]:
        result = {}
        for file in (self.run(id) / "answers").glob("*"):
            if re.fullmatch(r"[0-9]{1,12}", file.name):
                with left_out(file):
                    head, _, body = read_bytes(file).partition(b"\n")
                    values = parse_json(head)
                    result[int(file.name)] = Answer(body, str(values["media"]), bool(values["failed"]))
        return result

    def forget_answers(self, id: str, seqs: Sequence[int]) -> None:
        for seq in seqs:
            (self.run(id) / "answers" / str(seq)).unlink(missing_ok=True)

    def save(self, checkpoint: Checkpoint, files: Mapping[str, Any], overwrite: bool) -> Checkpoint:
        """Write a checkpoint folder with these files: (tensors, about) or bytes. Raises `BirlError` if it exists."""
        folder = self.folder(checkpoint)
        if folder.exists() and not overwrite:
            raise BirlError(f"There is a checkpoint {checkpoint.path} already; give another name, or overwrite=True.")
        partial = folder.with_name(folder.name + ".partial")
        clear(partial)
        partial.mkdir(parents=True, mode=0o700)
        try:
            for name, content in files.items():
                if isinstance(content, bytes):
                    (partial / name).write_bytes(content)
                else:
                    write_tensors(partial / name, *content)
            checkpoint.size = sum(f.stat().st_size for f in partial.iterdir())
            (partial / "checkpoint.json").write_text(json.dumps(asdict(checkpoint)))
        except OSError:  # the disk is full: free the space for others
            clear(partial)
            raise
        if folder.exists():
            old = folder.with_name(folder.name + OLD)
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
        self.known[checkpoint.path] = copy(checkpoint)
        return checkpoint

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self.run(checkpoint.run) / checkpoint.kind / checkpoint.name

    def checkpoints(self, run: str | None = None) -> Iterator[Checkpoint]:
        """The unexpired checkpoints; removes the others."""
        for path in sorted(self.known):
            if run is None or path.startswith(f"tinker://{run}/"):
                result = self.find(path)
                if result is not None:
                    yield result

    def _read(self) -> Iterator[Checkpoint]:
        for file in sorted((self.root / "runs").glob("*/*/*/checkpoint.json")):
            with left_out(file):
                result = READER.validate_python(read_json(file))
                if result.kind in KINDS and self.folder(result) == file.parent:  # else its metadata are of another
                    yield result

    def find(self, path: str) -> Checkpoint | None:
        """A copy of the checkpoint of a tinker:// path, or None. Changes to it are stored by `change`."""
        parsed(path)
        result = self.known.get(path)
        if result is not None and result.expires is not None and result.expires < time.time():
            self.known.pop(path, None)
            shutil.rmtree(self.folder(result), ignore_errors=True)
            return None
        return copy(result)

    def change(self, checkpoint: Checkpoint) -> None:
        replace(self.folder(checkpoint) / "checkpoint.json", json.dumps(asdict(checkpoint)).encode())
        self.known[checkpoint.path] = copy(checkpoint)

    def delete(self, what: str | Checkpoint) -> None:
        """Delete a run, by its id, or a checkpoint."""
        folder = self.run(what) if isinstance(what, str) else self.folder(what)
        gone = folder.with_name(folder.name + ".gone.partial")
        folder.rename(gone)
        if isinstance(what, Checkpoint):
            self.known.pop(what.path, None)
        shutil.rmtree(gone)

    def of(self, owner: str) -> list[Checkpoint]:
        return [c for c in list(self.known.values()) if c.owner == owner and self.find(c.path) is not None]

    def note(self, tenant: str, what: str, **about: Any) -> None:
        """Write an event to the audit log."""
        line = json.dumps({"time": time.time(), "tenant": tenant, "event": what, **about})
        append(self.root / "audit.jsonl", f"{line}\n".encode())


@contextmanager
def left_out(file: Path) -> Iterator[None]:
    """Skip an unreadable item with a warning; its files are kept."""
    try:
        yield
    except (BirlError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if file.exists():  # else it was removed meanwhile
            log.warning("%s cannot be read, and is left out: %s.", file, first_line(error) or type(error).__name__)


def file_of(id: str) -> str:
    """File name of an id. Raises `BirlError` for anything else: only ids become file names."""
    if not ID.fullmatch(id):
        raise BirlError(f"{id[:80]!r} is no session, run or sampler of this server.")
    return id.replace(":", "-")


def id_of(name: str) -> str:
    return name.replace("-", ":")


def parsed(path: str) -> tuple[str, str, str]:
    """Run, kind and name of a checkpoint's path. Raises `BirlError` if it is none."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS or not NAME.fullmatch(parts[2]):
        raise BirlError(f"{path[:200]!r} is no path of a checkpoint: tinker://RUN/weights/NAME, say.")
    file_of(parts[0])
    return parts[0], parts[1], parts[2]


def named(name: str) -> str:
    """Check a checkpoint's name. Raises `BirlError`."""
    if not NAME.fullmatch(name) or name.endswith(".partial"):
        raise BirlError(f"{name[:150]!r}: a checkpoint's name has letters, digits, dots, _ and -, at most 128.")
    if UNNAMED.fullmatch(name):
        raise BirlError(f"{name}: names of this form are reserved for weights without a name: give another name.")
    return name


def refusal(seq: int, reason: str, kind: str = "refused") -> Record:
    """A record in place of a rejected request: it keeps its number, and the reason is its answer. kind: refused |
    missing, if the request is unknown."""
    return Record(seq, kind, json.dumps({"reason": reason}).encode())


def framed(record: Record) -> bytes:
    head = {"seq": record.seq, "kind": record.kind, "size": len(record.body), "crc": zlib.crc32(record.body)}
    return json.dumps(head).encode() + b"\n" + record.body + b"\n"


def append(path: Path, data: bytes) -> None:
    """Append unbuffered, so that it survives a kill of the process. If the disk is full the part that was written is
    removed, as what follows it would be unreadable: raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(start)
            raise


def replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        save_file(kept, partial, metadata={"format": "pt", "about": json.dumps(about)})
    except SafetensorError as error:  # for example, the disk is full
        partial.unlink(missing_ok=True)
        raise OSError(f"{path.parent.name}/{path.name}: {error}") from error
    partial.replace(path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata. Raises `BirlError` if the file is damaged."""
    about = read_about(path)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise BirlError(f"{path.parent.name}/{path.name}: cannot be read ({type(error).__name__}).") from error


def read_about(path: Path) -> dict[str, Any]:
    """Metadata of a tensor file. Raises `BirlError` if the file is damaged."""
    try:
        check(path)
        with safe_open(path, "pt") as file:
            return dict(parse_json((file.metadata() or {}).get("about", "{}")))
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise BirlError(f"{path.parent.name}/{path.name}: cannot be read ({type(error).__name__}).") from error
