"""The folder of a run: who may write into it, what it says about the run, and which checkpoint to go on from."""

import errno
import json
import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.load import flatten, to_yaml
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.policy import Policy
from birl.learner.store import Store, location
from birl.models.load import save_hf_config
from birl.regular import check, read_json, read_text
from birl.track.log import replace as write_whole
from birl.track.runs import COMMAND_KEYS, began_at

try:
    import fcntl
except ImportError:  # not on Windows: there, nothing keeps two processes out of one folder
    fcntl = None

HOST = socket.gethostname()

# Keys that may change when a run goes on: its length, and what bounds memory or time but changes a result by rounding
# at most.
FREE = (
    *("steps", "epochs", "resume", "run", "threads", "watchdog"),
    *("learner.tokens_per_microbatch", "learner.gradient_checkpointing", "learner.max_logprob_gap"),
    *("weights.method", "weights.folder", "weights.bucket_mb", "weights.timeout", "weights.canary", "weights.max_gap"),
    *("reward.timeout", "reward.workers", "env.timeout", "rollout.max_failure_rate"),
)
FREE_SECTIONS = ("track.", "checkpoint.", "engine.", "parallel.")


def find_checkpoint(config: schema.RL | schema.Stage, run: Path) -> Path | None:
    """Which checkpoint to go on from; refuses a run folder that belongs to another configuration."""
    there = checkpoint.saved(run / "checkpoints")
    newest = there[-1].path if there else None  # where it is damaged, it is set aside with a warning
    if "://" in config.resume:
        return chosen_checkpoint(fetched(config.resume, run / "resumed"), run, newest)
    if newest is None and config.resume == "auto" and config.checkpoint.store:
        newest = recovered(location(config.checkpoint.store, run), run)
    if config.resume not in ("auto", "never"):
        return chosen_checkpoint(Path(config.resume), run, newest)
    # a try that ended before its first step leaves nothing to lose or to go on from
    metrics = run / "metrics.jsonl"
    used = newest is not None or (metrics.is_file() and metrics.stat().st_size > 0)
    if config.resume == "never":
        if used:
            raise BirlError(
                f"{run} holds a run already, and resume=never. Choose another folder (run=...) or delete this one."
            )
        return None
    if used:
        before, now = read_config(run), _plain(config)
        changed = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and not _free(k)]
        others = next((name for name, key in COMMAND_KEYS.items() if (key in before) != (key in now)), "")
        if others:
            raise BirlError(
                f"{run} belongs to a run of another command than `birl {type(config).__name__.lower()}`. "
                "To start a new run: run=ANOTHER_FOLDER."
            )
        if changed:
            last = newest or f"{run}/checkpoints/step-..."
            lines = "\n".join(f"  {k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in changed)
            raise BirlError(
                f"{run} belongs to a run with another configuration:\n{lines}\n"
                "To start a new run: run=ANOTHER_FOLDER. To continue its weights under this configuration: "
                f"run=ANOTHER_FOLDER resume={last}"
            )
    return newest


def recovered(url: str, run: Path) -> Path | None:
    """The newest intact checkpoint of a run on a store, into its empty folder; None where the store has none."""
    store = Store(url)
    steps = store.steps()
    if steps:
        store.take_about(run)
    for step in reversed(steps):
        print(f"{run} has no checkpoint: taking step {step} from {url}.", flush=True)
        try:
            return store.take(step, run / "checkpoints")
        except BirlError as error:
            print(f"WARNING: {error}", flush=True)
    if steps:
        raise BirlError(f"All {len(steps)} checkpoints at {url} are damaged. Begin anew with run=ANOTHER_FOLDER.")
    return None


def fetched(url: str, root: Path) -> Path:
    """`resume=URL`: a checkpoint on a store, or the newest one of a run there. Raises `BirlError`."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if (step := checkpoint.step_of(name)) >= 0:
        store, steps = Store(parent), [step]
        if steps[0] not in store.steps():
            raise BirlError(f"resume={url}: there is no complete checkpoint.")
    else:
        store = Store(url)
        steps = store.steps()
    if not steps:
        raise BirlError(f"resume={url}: there is no complete checkpoint of a run.")
    return store.take(steps[-1], root)


def chosen_checkpoint(chosen: Path, run: Path, newest: Path | None) -> Path:
    """`resume=FOLDER`, unless that is no checkpoint, or would mix its history with another one in `run`."""
    if not (chosen / "manifest.json").is_file():  # a run: its newest one
        inside = checkpoint.latest(chosen / "checkpoints") or checkpoint.latest(chosen)
        if inside is None:
            raise BirlError(
                f"resume={chosen}: holds no complete checkpoint. `birl checkpoints RUN` lists those of a run."
            )
        chosen = inside
    if newest is not None and os.path.realpath(newest) != os.path.realpath(chosen):
        raise BirlError(
            f"resume={chosen}: {run} has gone on to {newest.name}, and going on from another place would mix the two. "
            f"Choose run=ANOTHER_FOLDER, leave out resume=... to go on from {newest}, or delete what you do not want."
        )
    return chosen


def read_config(run: Path) -> dict[str, Any]:
    try:
        found = read_json(run / "config.json")
    except (OSError, ValueError) as error:
        raise BirlError(
            f"{run}/config.json, which says what this run is, cannot be read ({error}). Choose another folder with "
            f"run=... and go on from a checkpoint with resume={run}/checkpoints/step-..."
        ) from error
    return found if isinstance(found, dict) else {}


def claim(run: Path, config: schema.RL | schema.Stage, policy: Policy) -> None:
    """Write the resolved configuration and the model's files but its weights into the run folder: all of a file or
    nothing, as an earlier try may have left good ones."""
    part, model = run / "model.part", run / "model"
    try:
        run.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        save_hf_config(policy.model, policy.tokenizer, part)
        shutil.rmtree(model, ignore_errors=True)
        part.rename(model)
        write_whole(run / "config.yaml", to_yaml(config).encode())
        write_whole(run / "config.json", json.dumps(_plain(config), indent=1).encode())
    except BirlError:
        raise
    except Exception as error:  # the tokenizers library has no error type of its own
        shutil.rmtree(part, ignore_errors=True)
        raise _unwritable(run, error) from error


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes out of a run folder. The lock ends with this process, however that ends; only its file may
    be left, which is no obstacle. Raises `BirlError` where another one has it."""
    path = run / ".lock"
    try:
        handles = _lock(path)
    except BlockingIOError as error:
        pid, host = "", ""
        with suppress(OSError, ValueError):
            pid, _, host, *_ = (*read_text(path).split("\n"), "", "", "")
        raise BirlError(
            f"{run} is in use by another birl process{f' (pid {pid})' if pid else ''}, and two would overwrite each "
            "other's files. Wait for it, stop it, or choose another folder with run=..."
            + (f" It runs on {host}; if it has ended there, delete {path}." if host not in ("", HOST) else "")
        ) from error
    except OSError as error:
        raise _unwritable(run, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        for handle in handles:
            os.close(handle)
        with suppress(OSError):
            run.rmdir()  # only when nothing was written into it


def _lock(path: Path) -> list[int]:
    """Open files that are locked: the folder, so that nothing gets in when the lock file is deleted, and the file, with
    our pid in it. Raises `BlockingIOError` where one is taken."""
    for _ in range(20):
        with suppress(FileNotFoundError, FileExistsError):  # its last holder may remove it, and the folder, right now
            path.parent.mkdir(parents=True, exist_ok=True)
            return _try_lock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _try_lock(path)


def _try_lock(path: Path) -> list[int]:
    handles: list[int] = []
    try:
        if fcntl is not None:
            with suppress(PermissionError):  # a folder that cannot be listed
                handles.append(os.open(path.parent, os.O_RDONLY))
                if not _flock(handles[0]):
                    os.close(handles.pop())  # NFS locks files only
                elif os.fstat(handles[0]).st_ino != path.parent.stat().st_ino:
                    raise FileNotFoundError(path.parent)
        with suppress(FileNotFoundError):
            check(path)
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        if not _flock(handles[-1]):
            os.close(handles.pop())
            _own(path)
            return handles
        if os.fstat(handles[-1]).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
        os.ftruncate(handles[-1], 0)
        os.write(handles[-1], f"{os.getpid()}\n".encode())
    except BaseException:
        for handle in handles:
            with suppress(OSError):
                os.close(handle)
        raise
    return handles


def _flock(handle: int) -> bool:
    """Whether the file is locked now; False where its disk has no locks. Raises `BlockingIOError` where another process
    has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _own(path: Path) -> None:
    """Take a lock file where there are no locks: it says which process of which machine has the folder. Raises
    `BlockingIOError` unless that process is known to have ended."""
    text = read_text(path)
    if text and not _ended(text):
        raise BlockingIOError(errno.EAGAIN, "the folder is in use", str(path))
    mine = path.with_name(f".lock-{os.getpid()}-{secrets.token_hex(4)}")
    mine.write_text(f"{os.getpid()}\n{began_at(os.getpid())}\n{HOST}\n")
    try:
        before = path.with_name(f"{mine.name}.before")
        os.rename(path, before)  # of two that find it free, one fails here: FileNotFoundError, and looks again
        try:
            if read_text(before) != text:  # another one took it between
                raise BlockingIOError(errno.EAGAIN, "the folder is in use", str(path))
            os.link(mine, path)
        except BlockingIOError:
            os.rename(before, path)
            raise
        finally:
            before.unlink(missing_ok=True)
    finally:
        mine.unlink(missing_ok=True)


def _ended(text: str) -> bool:
    """Whether the process that a lock file names has ended, as far as can be known here."""
    pid, began, host = (*text.split("\n"), "", "", "")[:3]
    if not pid.isdecimal() or (host and host != HOST):
        return not pid.isdecimal()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return bool(began) and began != began_at(int(pid))


def _unwritable(run: Path, error: Exception) -> BirlError:
    reason = getattr(error, "strerror", None) or str(error)
    return BirlError(f"Cannot write into the run folder {run}: {reason}. Choose another with run=..., or make room.")


def _plain(config: schema.RL | schema.Stage) -> dict[str, Any]:
    return json.loads(json.dumps(flatten(config)))


def _free(key: str) -> bool:
    return key in FREE or key.startswith(FREE_SECTIONS)


def next_commands(run: Path, finished: bool, talks: bool = True, tensorboard: bool = True) -> list[str]:
    """`talks`: it is a language model, not one that scores. `tensorboard`: the run has written events for it."""
    if not finished:
        return ["run the same command again to go on"]
    name = shlex.quote(str(run))
    use = f"birl chat {name}" if talks else f"birl rl reward=model reward.model={name}"
    events = [f"tensorboard --logdir {shlex.quote(str(run.parent))}"] if tensorboard else []
    return [use, f"birl view {name}", f"birl checkpoints {name}", *events]
