"""What is done to a run. Each function says to whom, or None where there was no chance to."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tests.chaos.processes import Child, Server, kill, no_room, room
from tests.chaos.watched import Watched


def kinds(run: Watched) -> dict[str, Callable[[], str | None]]:
    """By name; how long and how much is drawn when it happens."""
    rng = run.rng
    found: dict[str, Callable[[], str | None]] = {
        "engine killed while it generates": partial(kill_generating, run),
        "engine killed while it loads": partial(kill_loading, run),
        "learner killed": lambda: kill_learner(run, 0.0),
        "learner killed while it saves": partial(kill_saving, run),
        "learner killed while it syncs": partial(kill_syncing, run),
        "engine frozen": lambda: freeze_engine(run, rng.uniform(0.5, 5)),
        "engine frozen beyond its deadline": lambda: freeze_engine(run, run.deadline + rng.uniform(1, 8)),
        "learner frozen": lambda: freeze_learner(run, rng.uniform(0.5, 5)),
        "learner frozen beyond a deadline": lambda: freeze_learner(run, run.deadline + rng.uniform(1, 4)),
        "disk full": lambda: fill_disk(run, rng.choice([0, 60_000, 150_000, 1_000_000])),
    }
    if run.attach:
        found |= {
            "connections dropped": lambda: network(run, "refuse", rng.uniform(0, 4)),
            "connections delayed": lambda: network(run, "delay", rng.uniform(1, 5)),
            "connections silent": lambda: network(run, "silent", rng.uniform(1, 12)),
            "answer cut in the middle": lambda: network(run, "cut", 2.0),
        }
    return found


def kill_generating(run: Watched) -> str | None:
    found: list[Server] = []
    if not run.until(lambda: found.extend(s for s in [run.generating()] if s) or found, 10.0):
        return None
    kill([found[0].pid])
    return f"engine {found[0].port}"


def kill_loading(run: Watched) -> str | None:
    servers = run.servers()
    if not servers or not run.new_weights():
        return None
    time.sleep(run.rng.uniform(0, 0.03))
    chosen = run.rng.choice(servers)
    kill([chosen.pid])
    return f"engine {chosen.port}"


def kill_learner(run: Watched, after: float) -> str | None:
    if run.learner is None:
        return None
    time.sleep(after)
    run.killed = True
    run.learner.send(signal.SIGKILL)
    return f"process {run.learner.pid}"


def kill_saving(run: Watched) -> str | None:
    if not run.until(lambda: [*run.folder.glob("checkpoints/*.part")], 15.0, every=0.001):
        return None
    return kill_learner(run, run.rng.uniform(0, 0.04))


def kill_syncing(run: Watched) -> str | None:
    """While the folder is written, or while engines load and prove."""
    part = run.rng.random() < 0.3 and run.method not in ("direct", "nccl")
    if part and not run.until(lambda: run.versions(".v*.part"), 15.0, every=0.001):
        return None
    if not part and not run.new_weights():
        return None
    return kill_learner(run, run.rng.uniform(0, 0.002 if part else 0.1))


def freeze(run: Watched, pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        Child(pid, lambda: None).send(signal.SIGSTOP)
        run.until(lambda: False, seconds)
        Child(pid, lambda: None).send(signal.SIGCONT)


def freeze_engine(run: Watched, seconds: float) -> str | None:
    chosen = run.generating() or next(iter(run.servers()), None)
    if chosen is None:
        return None
    freeze(run, chosen.pid, seconds)
    return f"engine {chosen.port}, {seconds:.1f} s"


def freeze_learner(run: Watched, seconds: float) -> str | None:
    if run.learner is None:
        return None
    freeze(run, run.learner.pid, seconds)
    return f"{seconds:.1f} s"


def fill_disk(run: Watched, limit: int) -> str | None:
    """Until the learner notices; where nothing it writes is that large, there is room again."""
    if run.learner is None:
        return None
    pid, run.starved = run.learner.pid, True
    no_room(pid, limit)
    run.until(lambda: False, 12.0)
    if run.learner is None:
        return f"no file beyond {limit} bytes"
    room(pid)
    return None


def network(run: Watched, mode: str, seconds: float) -> str | None:
    proxy = run.rng.choice(run.proxies)
    before = proxy.cuts
    proxy.become(mode, run.rng.uniform(0.02, 0.3))
    run.until(lambda: mode == "cut" and proxy.cuts > before, max(seconds, 0.1))
    proxy.become("open")
    if mode == "cut" and proxy.cuts == before:
        return None
    return f"engine {proxy.target}, {seconds:.1f} s"
