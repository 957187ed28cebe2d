"""Real jobs on a real Ray cluster of several nodes on this machine, to which things happen. Run by an interpreter that
has Ray (`make setup-ray`):

    .venv-ray/bin/python -m tests.launch.ray_drill FOLDER SCENARIO...      all scenarios where none is named

Prints one line of JSON for each: what happened, and the seconds. FOLDER/results.jsonl has them too.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from birl.launch import ray as launcher
from birl.launch.ray_cluster import NAMESPACE
from tests.launch.ray_machines import LIMIT, Launched, Machines, ray, until

RESULTS = "results.jsonl"
RL = (
    *("reward=length", "reward.length_target=8", "rollout.max_tokens=8", "rollout.prompts=2", "rollout.group_size=2"),
    *("rollout.max_failure_rate=1", "engine.kind=birl", "engine.max_batch=4", "engine.kv_cache_gb=0.01"),
    *("weights.method=direct", "rollout.max_staleness=1", "launch.nodes=2"),
)


def engine_node(machines: Machines) -> dict[str, Any]:
    """The machine with an engine is lost; there is room on another one."""
    for _ in range(3):
        machines.add(1)
    job = Launched(machines, "engine-node", "rl", *RL, "steps=2000")
    job.reach(2)
    named = sorted(a["name"] for a in ray.util.list_named_actors(all_namespaces=True))
    status = subprocess.run(
        [sys.executable, "-m", "birl", "status", str(job.run)], capture_output=True, text=True, timeout=LIMIT
    )
    assert machines.node_of("birl:engine-node:engine:0") is not machines.node_of("birl:engine-node:learner:0")
    before = max(job.steps())
    began = time.monotonic()
    machines.lose(machines.node_of("birl:engine-node:engine:0"))
    until(lambda: max(job.steps()) > before + 4 or job.state() in launcher.ENDED, "a step after the loss")
    seconds = time.monotonic() - began
    launcher.stop(job.handle)
    text = "".join(launcher.logs(job.handle, "", False))
    return {"named": named, "status": status.stdout, "seconds": seconds, "log": text[-3000:], **job.report()}


def learner_node(machines: Machines) -> dict[str, Any]:
    """The machine with the learner is lost."""
    for _ in range(3):
        machines.add(1)
    job = Launched(machines, "learner-node", "rl", *RL, "steps=2000")
    job.reach(2)
    before = max(job.steps())
    began = time.monotonic()
    machines.lose(machines.node_of("birl:learner-node:learner:0"))
    until(lambda: max(job.steps()) > before + 1, "a step after the loss")
    seconds = time.monotonic() - began
    launcher.stop(job.handle)
    return {"seconds": seconds, **job.report()}


def ranks(machines: Machines) -> dict[str, Any]:
    """Two ranks on two machines; one is killed, and the others go on from the checkpoint."""
    machines.add(1)
    machines.add(1)
    words = ("parallel.fsdp=2", "steps=40", "batch_size=4", "launch.nodes=2")
    job = Launched(machines, "ranks", "sft", *words)
    job.reach(2)
    pid = ray.get(ray.get_actor("birl:ranks:learner:1", namespace=NAMESPACE).look.remote(), timeout=20).pid
    before = max(job.steps())
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: max(job.steps()) > before + 1, "a step after the loss")
    return {"seconds": time.monotonic() - began, **job.report()}


def supervisor(machines: Machines) -> dict[str, Any]:
    """The supervisor is killed: the processes go on, and it finds them again."""
    machines.add(1)
    machines.add(1)
    job = Launched(machines, "supervisor", "rl", *RL, "steps=2000")
    job.reach(2)
    actors = [ray.get_actor(f"birl:supervisor:{role}:0", namespace=NAMESPACE) for role in ("learner", "engine")]
    pids = [ray.get(actor.look.remote(), timeout=20).pid for actor in actors]
    began = time.monotonic()
    ray.kill(ray.get_actor("birl:supervisor", namespace=NAMESPACE), no_restart=False)
    until(lambda: any(r.state == "running" for r in launcher.status(job.handle)[1:]), "the supervisor to be back")
    seconds = time.monotonic() - began
    same = pids == [ray.get(actor.look.remote(), timeout=20).pid for actor in actors]
    launcher.stop(job.handle)
    return {"seconds": seconds, "same": same, **job.report()}


def scale(machines: Machines) -> dict[str, Any]:
    """One engine more while the run goes on, and one less."""
    for _ in range(3):
        machines.add(1)
    job = Launched(machines, "scale", "rl", *RL, "steps=2000")
    job.reach(2)
    began = time.monotonic()
    birl = [sys.executable, "-m", "birl", "scale", str(job.run)]
    more = subprocess.run([*birl, "engines=+1"], capture_output=True, text=True, timeout=LIMIT)
    until(lambda: "engine joined" in learner_log(job), "the engine to join")
    seconds = time.monotonic() - began
    less = subprocess.run([*birl, "engines=1"], capture_output=True, text=True, timeout=LIMIT)
    until(lambda: len(launcher.status(job.handle)) == 3, "the engine to leave")
    before = max(job.steps())
    until(lambda: max(job.steps()) > before, "a step after that")
    launcher.stop(job.handle)
    return {"seconds": seconds, "said": more.stdout + more.stderr + less.stdout + less.stderr, **job.report()}


def learner_log(job: Launched) -> str:
    return "".join(launcher.logs(job.handle, "learner", False))


def mistake(machines: Machines) -> dict[str, Any]:
    """What `birl` refuses is not tried again."""
    machines.add(1)
    (machines.folder / "empty.jsonl").write_text("")
    job = Launched(machines, "mistake", "sft", "steps=2", f"data.train={machines.folder}/empty.jsonl")
    return job.report()


def no_room(machines: Machines) -> dict[str, Any]:
    machines.add(1)
    job = Launched(machines, "no-room", "sft", "steps=2", "launch.cpus=64", "launch.start_timeout=3")
    return job.report()


def collectors(machines: Machines) -> dict[str, Any]:
    """Environments in actors: room is added while episodes wait, a lost machine costs its episodes alone."""
    from birl.config import schema
    from birl.envs.open import open_world
    from birl.types import Message, Task

    machines.add(1)
    machines.add(1)
    found: dict[str, Any] = {}

    async def episode(world: Any, task: Task, hold: asyncio.Event) -> str:
        env = world.open(task)
        try:
            await env.admit()
            await env.start()
            await hold.wait()
            await env.step(Message(role="assistant", content="3"))
            return env.place.name
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            await env.close()

    async def play() -> None:
        options = {"inner": "guess_number", "most": "2", "episodes": "2", "idle": "1", "keys": "[high=7]"}
        began = time.monotonic()
        world = await open_world(schema.Env(kind="ray", options=options), lambda prompt: "")
        found["start"] = time.monotonic() - began
        try:
            assert world.rows is not None
            rows = world.rows("train")
            found["rows"] = len(rows)
            tasks = [Task(id=str(i), prompt="", answer=rows[i]["answer"], columns=rows[i]) for i in range(6)]  # pyright: ignore
            hold = asyncio.Event()
            playing = [asyncio.create_task(episode(world, task, hold)) for task in tasks]
            pool = world.shared
            while len([p for p in pool.places if p.ready]) < 2 or sum(len(p.open) for p in pool.places) < 4:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            found["grown"], found["waiting"] = len(pool.places), len(pool.waiting)
            victim = machines.nodes[0]
            began = time.monotonic()
            machines.lose(victim)
            await asyncio.sleep(0.5)
            hold.set()
            found["episodes"] = await asyncio.gather(*playing)
            found["seconds"], found["lost"] = time.monotonic() - began, pool.lost
            while len(pool.places) > 1:
                await asyncio.sleep(0.1)
            found["shrunk"] = len(pool.places)
        finally:
            await world.close()

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            await play()

    asyncio.run(bounded())
    return found


def environments(machines: Machines) -> dict[str, Any]:
    """A whole run with env=ray."""
    machines.add(2)
    words = ("env=ray", "env.inner=guess_number", "env.most=1", "env.max_turns=2", "rollout.max_tokens=8")
    words += ("rollout.prompts=2", "rollout.group_size=2", "steps=2", "model.max_length=256")
    words += ("learner.tokens_per_microbatch=256",)
    job = Launched(machines, "environments", "rl", *words)
    return job.report()


def token(machines: Machines) -> dict[str, Any]:
    """Who has another token does not come in."""
    machines.add(1)
    script = "from birl.launch.ray_cluster import connect; from birl.errors import BirlError\n"
    script += "import sys\ntry:\n connect('')\nexcept BirlError as error:\n print(error)\n sys.exit(3)"
    found: dict[str, Any] = {}
    for name, more in {"wrong": {"RAY_AUTH_TOKEN": "0" * 64}, "open": {"RAY_AUTH_MODE": "disabled"}}.items():
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **more}, capture_output=True, text=True, timeout=60
        )
        found[name] = [done.returncode, done.stdout, done.stderr[-500:]]
    return found


def head(machines: Machines) -> dict[str, Any]:
    """The head node is lost, and the whole cluster with it; on a new one the same command goes on. Comes last."""
    machines.add(1)
    machines.add(1)
    job = Launched(machines, "head", "rl", *RL, "steps=2000")
    job.reach(2)
    actors = [ray.get_actor(f"birl:head:{role}:0", namespace=NAMESPACE) for role in ("learner", "engine")]
    pids = [ray.get(actor.look.remote(), timeout=20).pid for actor in actors]
    ray.shutdown()  # a client that is connected would be ended by Ray, a minute later
    began = time.monotonic()
    machines.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all processes")
    seconds, steps = time.monotonic() - began, max(job.steps())
    machines.close()
    machines.begin()
    machines.add(1)
    machines.add(1)
    again = Launched(machines, "head", "rl", *RL, "steps=2000")
    again.reach(steps + 2)
    launcher.stop(again.handle)
    return {"seconds": seconds, **again.report()}


SCENARIOS: dict[str, Callable[[Machines], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        engine_node,
        learner_node,
        ranks,
        supervisor,
        scale,
        mistake,
        no_room,
        collectors,
        environments,
        token,
        head,
    )
}


def main(folder: Path, chosen: list[str]) -> None:
    machines = Machines(folder)
    try:
        for name in chosen or SCENARIOS:
            began = time.monotonic()
            try:
                found = SCENARIOS[name](machines)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            machines.sweep()
            line = json.dumps({"scenario": name, "took": round(time.monotonic() - began, 1), **found})
            print(line, flush=True)
            with (folder / RESULTS).open("a") as file:  # Ray prints between our lines
                file.write(line + "\n")
    finally:
        machines.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
