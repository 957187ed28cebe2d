"""Copies of checkpoints on an object store: any URL that fsspec knows (s3://bucket/prefix, file://, memory://).

    STORE/RUN/config.json, model/...           configuration and model of the run: written once
    STORE/RUN/step-000010/tensors/...          each rank uploads the files that it wrote
    STORE/RUN/step-000010/manifest.json        bytes and SHA-256 of every file
    STORE/RUN/step-000010/COMPLETE             the manifest's SHA-256; written last, so that it makes the rest count

Writing an object is atomic, but a checkpoint has many: without COMPLETE it does not count.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from birl.errors import BirlError, first_line
from birl.learner import checkpoint, step_folders
from birl.models.manifest import digest, files
from birl.parallel.ranks import Ranks
from birl.regular import clear, inside

T = TypeVar("T")
COMPLETE = "COMPLETE"
ABOUT = ("config.json", "config.yaml", "model")  # of the run folder
TRIES = 6
PAUSE = 0.5  # seconds before the second try; twice as long before each further one


class Damaged(BirlError):
    """A checkpoint on a store differs from what was written; others may be intact."""


class Store:
    """The checkpoints of one run at `url`. `pause` [s]: see `PAUSE`."""

    def __init__(self, url: str, pause: float = PAUSE) -> None:
        import fsspec

        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BirlError(
                f"checkpoint.store={url}: {error} For s3:// install birl[s3] (`pip install 'birl[s3]'`)."
            ) from error
        self.url, self.pause = url.rstrip("/"), pause
        self.root = self.root.rstrip("/")

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Raises `BirlError` if the store does not answer."""
        self.fs.invalidate_cache()
        names = self._tried("list", lambda: self.fs.ls(self.root, detail=False) if self.fs.exists(self.root) else [])
        steps = [step_folders.step_of(name.rstrip("/").rpartition("/")[2]) for name in names]
        return sorted(
            s for s in steps if s >= 0 and self._tried("look at", lambda s=s: self.fs.exists(self._at(s, COMPLETE)))
        )

    def put(self, path: Path, step: int, ranks: Ranks, group: Any) -> None:
        """Upload the complete checkpoint `path`; with `ranks` each rank its own files. Raises on all of them if one
        fails after all retries; the checkpoint then does not count."""
        checkpoint.agreed(lambda: self._begin(step) if ranks.rank == 0 else None, ranks, group)
        checkpoint.agreed(lambda: self._files(path, checkpoint.own_files(path, ranks.rank), step), ranks, group)
        checkpoint.agreed(lambda: self._end(path, step) if ranks.rank == 0 else None, ranks, group)

    def about(self, run: Path) -> None:
        """Upload configuration and model of the run, for resuming without its run folder."""
        for name in ABOUT:
            for file in (f for f in [run / name, *(run / name).rglob("*")] if f.is_file()):
                inside(run, file.relative_to(run).as_posix())
                target = f"{self.root}/{file.relative_to(run)}"
                self._tried("write", lambda f=file, t=target: self._upload(f, t))

    def take_about(self, run: Path) -> None:
        """Download the files of `about` into an empty run folder."""
        for name in ABOUT:
            for there in self._tried("list", lambda n=name: self.fs.find(f"{self.root}/{n}")):
                here = inside(run, there.removeprefix(f"{self.root}/"))
                self._check_object(there)
                here.parent.mkdir(parents=True, exist_ok=True)
                self._tried("read", lambda t=there, h=here: self.fs.get_file(t, str(h)))

    def take(self, step: int, root: Path) -> Path:
        """Download a complete checkpoint into `root`, replacing an existing one. Raises `Damaged` if it differs from
        what was written, `BirlError` if the store fails."""
        target, part = root / f"step-{step:06d}", root / f"step-{step:06d}.part"
        clear(part)
        part.mkdir(parents=True)
        try:
            listed = files(self._content(step, "manifest.json"))
        except ValueError as error:
            shutil.rmtree(part)
            raise Damaged(f"{self.url}/{target.name}/manifest.json cannot be read: {error}.") from error
        for name in (*listed, "manifest.json"):
            here = inside(part, name)
            here.parent.mkdir(parents=True, exist_ok=True)
            self._check_object(self._at(step, name))
            self._tried("read", lambda n=name, h=here: self.fs.get_file(self._at(step, n), str(h)))
        marker = self._content(step, COMPLETE).decode("utf-8", "replace")
        damage = checkpoint.verify(part)
        if marker != digest(part / "manifest.json"):
            damage.append("manifest.json has another SHA-256 than COMPLETE says")
        if damage:
            shutil.rmtree(part)
            raise Damaged(f"{self.url}/{target.name} is damaged: {'; '.join(damage[:3])}.")
        clear(target)
        return part.rename(target)

    def prune(self, keep_last: int, keep: set[int]) -> list[int]:
        """Delete all but the newest `keep_last` (0: all stay) and the steps in `keep`: the marker first."""
        steps = self.steps()
        removed = [s for s in steps[:-keep_last] if s not in keep] if keep_last > 0 else []
        for step in removed:
            self._begin(step)
        return removed

    def _begin(self, step: int) -> None:
        """Delete all objects of a step, the marker first."""
        self.fs.invalidate_cache()
        for what in (self._at(step, COMPLETE), self._at(step)):
            self._tried("delete", lambda w=what: self.fs.rm(w, recursive=True) if self.fs.exists(w) else None)

    def _files(self, path: Path, files: list[Path], step: int) -> None:
        for file in files:
            target = self._at(step, str(file.relative_to(path)))
            self._tried("write", lambda f=file, t=target: self._upload(f, t))

    def _end(self, path: Path, step: int) -> None:
        self._files(path, [path / "state.json", path / "manifest.json"], step)
        mark = digest(path / "manifest.json").encode()
        self._tried("write", lambda: self.fs.pipe_file(self._at(step, COMPLETE), mark))

    def _upload(self, file: Path, target: str) -> None:
        """Upload one object and check its size."""
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(file), target)
        self.fs.invalidate_cache()
        if self.fs.size(target) != file.stat().st_size:
            raise OSError(f"{target} has {self.fs.size(target)} bytes instead of {file.stat().st_size}")

    def _content(self, step: int, name: str) -> bytes:
        self._check_object(self._at(step, name))
        return self._tried("read", lambda: self.fs.cat_file(self._at(step, name)))

    def _check_object(self, name: str) -> None:
        """Raises `Damaged` for what is no regular file: on a mounted disk, a pipe or a link."""
        about = self._tried("look at", lambda: self.fs.info(name) if self.fs.exists(name) else {"type": "file"})
        if about["type"] != "file" or about.get("islink"):
            raise Damaged(f"{name} is not a regular file. Delete it, or choose another checkpoint.")

    def _at(self, step: int, name: str = "") -> str:
        return f"{self.root}/step-{step:06d}" + (f"/{name}" if name else "")

    def _tried(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` with retries. Raises `BirlError` after the last one."""
        for attempt in range(1, TRIES + 1):
            try:
                return work()
            except Exception as error:  # every store has errors of its own
                if what == "read" and isinstance(error, FileNotFoundError):
                    raise Damaged(f"{self.url} has lost {first_line(error)}.") from error
                if attempt == TRIES:
                    raise BirlError(
                        f"checkpoint.store: could not {what} {self.url} in {TRIES} tries: "
                        f"{first_line(error)}." + (" The run folder has all checkpoints." if what == "write" else "")
                    ) from error
                time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError("the last try returns or raises")


def location(store: str, run: Path) -> str:
    """URL of a run's checkpoints on a store: a folder of the run's name."""
    return f"{store.rstrip('/')}/{run.resolve().name}"
