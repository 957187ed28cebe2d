"""Registry of server addresses: "experiment/trial" -> addresses, in files in this user's cache folder.

Each server writes one file and touches it every few seconds. A file not touched for `LIFE` seconds belongs to a killed
server: it is not listed, and is removed. Tokens are never written here.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from birl.cache import cache_folder
from birl.errors import BirlError
from birl.regular import read_json

LIFE = 30.0  # seconds
BEAT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A registered server. `since`: time of its registration [s of the clock].

    Example: Entry(name="arithmetic/0", address="http://127.0.0.1:8000", pid=17, model="smollm2", since=1.7e9,
                   file=Path(...))
    """

    name: str
    since: float
    address: str
    pid: int
    model: str
    file: Path


def folder(name: str) -> Path:
    """Folder of a name. Raises `BirlError` if the name is invalid."""
    parts = name.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9_+=,@-][A-Za-z0-9_.+=,@-]{0,99}", part) for part in parts):
        raise BirlError(
            f"name={name}: must be experiment/trial, two parts of letters, digits and . _ - + = , @ that do not begin "
            "with a dot."
        )
    return cache_folder("servers") / parts[0] / parts[1]


def register(name: str, address: str, pid: int, model: str) -> Entry:
    """Register a server; `beat` keeps it from being swept. Other servers may have the same name."""
    place = folder(name)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (place, place.parent, place.parent.parent):
            one.chmod(0o700)
        file = place / f"{pid}-{secrets.token_hex(4)}.json"
        entry = Entry(name=name, address=address, pid=pid, model=model, since=time.time(), file=file)
        _write(entry)
    except OSError as error:
        raise BirlError(f"name={name}: {place} cannot be written: {error.strerror}. Set BIRL_CACHE.") from error
    return entry


def _write(entry: Entry) -> None:
    part = entry.file.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump({key: getattr(entry, key) for key in ("address", "pid", "model", "since")}, opened)
    part.replace(entry.file)


def find(name: str) -> list[str]:
    """Addresses of the live servers, the oldest first."""
    return [entry.address for entry in entries(name)]


def entries(name: str) -> list[Entry]:
    """The live servers, the oldest first; removes the files of others."""
    result: list[Entry] = []
    now = _now(folder(name))
    for file in folder(name).glob("*"):
        try:
            if now - file.stat().st_mtime > LIFE:
                file.unlink()
            elif file.suffix == ".json":
                data = read_json(file)
                known = {key: data[key] for key in ("address", "pid", "model", "since")}
                result.append(Entry(name=name, file=file, **known))
        except (OSError, ValueError, KeyError, TypeError):  # removed by another process, or not ours
            continue
    return sorted(result, key=lambda entry: (entry.since, entry.file.name))


def _now(place: Path) -> float:
    """Time of the clock that stamps files in `place`: if this machine's were ahead of it, every server would seem dead.
    This machine's if nothing can be written there."""
    probe = place / f".now-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def touch(entry: Entry) -> None:
    """Renew the registration. A removed file is written again."""
    try:
        os.utime(entry.file)
    except FileNotFoundError:
        entry.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(entry)


async def beat(entry: Entry) -> None:
    """Renew the registration until cancelled."""
    while True:
        with contextlib.suppress(OSError):
            touch(entry)
        await asyncio.sleep(BEAT)


def forget(entry: Entry) -> None:
    """Remove the registration. Folders stay as long as another server has the name."""
    with contextlib.suppress(OSError):
        entry.file.unlink(missing_ok=True)
        entry.file.parent.rmdir()
        entry.file.parent.parent.rmdir()
