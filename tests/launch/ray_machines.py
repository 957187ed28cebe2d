"""A real Ray cluster of several nodes on this machine, which can be lost, and jobs on it. For an interpreter that has
Ray (`make setup-ray`)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when Ray is imported
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: whatever else this machine does would go first
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process for each CPU that nobody needs

import ray  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from birl.launch import ray as launcher
from birl.launch.launcher import find
from birl.launch.ray_cluster import NAMESPACE
from birl.rollout.ledger import audit
from tests.tiny import tiny_model_folder

SECRET = "canary-of-the-ray-drill"
LIMIT = float(os.environ.get("BIRL_DRILL_LIMIT", "90"))  # seconds for any one thing to happen


def until(done: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    end = time.monotonic() + limit
    while not (found := done()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {limit:g} s")
        time.sleep(0.1)
    return found


def started(start: Callable[[], Any], tries: int = 4) -> Any:
    """Ray gives a node 30 s, which a busy machine may take."""
    for left in reversed(range(tries)):
        try:
            return start()
        except Exception as error:
            if "timed out" not in str(error) or not left:
                raise


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


class Machines:
    """A cluster whose head runs nothing, and nodes that can be lost. `folder`: of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        if not self.model.exists():
            tiny_model_folder(self.model)
        rows = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2), "text": f"{i} + 2 = {i + 2}."} for i in range(32)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.begin()

    def begin(self) -> None:
        """A head, and this process its client."""
        head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        self.cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        os.environ["RAY_ADDRESS"] = self.cluster.address
        self.nodes: list[Any] = []
        ray.init(address=self.cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")

    def add(self, cpus: int) -> Any:
        node = started(lambda: self.cluster.add_node(num_cpus=cpus, object_store_memory=80 * 2**20))
        self.nodes.append(node)
        return node

    def lose(self, node: Any) -> None:
        """As by a power cut: all its processes are gone at once. Ray's own workers would go on for some seconds."""
        self.nodes.remove(node)
        processes = descendants(node.all_processes["raylet"][0].process.pid)
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def node_of(self, actor: str) -> Any:
        """The machine where a named actor is."""
        seen = ray.get(ray.get_actor(actor, namespace=NAMESPACE).look.remote(), timeout=20)
        return next(n for n in self.nodes if n.node_id.startswith(seen.node))

    def sweep(self) -> None:
        """Nothing of one scenario is there in the next, however it ended."""
        for actor in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        for group in ray.util.placement_group_table().values():
            if group["state"] != "REMOVED":
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
        for node in list(self.nodes):
            self.lose(node)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


class Launched:
    """A job that `birl launch ray` has started, from a process that is gone since."""

    def __init__(self, machines: Machines, name: str, command: str, *words: str) -> None:
        self.run, self.name = machines.folder / name, name
        common = [
            f"model.path={machines.model}", f"data.train={machines.folder}/rows.jsonl", f"run={self.run}", "threads=1",
            "track.tensorboard=false", "track.report=false", "track.console=plain", "checkpoint.every=1",
        ]  # fmt: skip
        keys = ["launch.keep=5", "launch.env=[DRILL_SECRET]", f"launch.folder={machines.folder}"]
        environment = {**os.environ, "DRILL_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        self.words = [sys.executable, "-m", "birl", "launch", "ray", command, *common, *words, *keys]
        done = subprocess.run(self.words, env=environment, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        self.handle = find(str(self.run))

    def state(self) -> str:
        return launcher.Asked(self.handle)("status")[0]

    def why(self) -> str:
        return launcher.Asked(self.handle)("status")[1]

    def told(self) -> list[str]:
        return launcher.Asked(self.handle)("told")

    def steps(self) -> list[int]:
        log = self.run / "metrics.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def reach(self, step: int) -> None:
        until(
            lambda: max(self.steps(), default=0) >= step or self.state() in ("failed",), f"step {step} of {self.name}"
        )
        if self.state() == "failed":
            raise RuntimeError("\n".join([self.why(), *self.told(), *launcher.logs(self.handle, "", False)]))

    def finish(self) -> str:
        return until(lambda: (s := self.state()) in launcher.ENDED and s, f"the end of {self.name}")

    def report(self) -> dict[str, Any]:
        """Figures at the end."""
        state, steps = self.finish(), self.steps()
        found = {"state": state, "why": self.why(), "steps": steps, "told": self.told()}
        if (self.run / "ledger.jsonl").exists():
            ledger = audit(self.run)
            found |= {"problems": ledger.problems, "tokens": dict(ledger.tokens), "sampled": ledger.sampled}
        files = [p for p in self.run.rglob("*") if p.is_file()]
        secret = (SECRET.encode(), os.environ["RAY_AUTH_TOKEN"].encode())
        found["secret"] = [str(p) for p in files if any(s in p.read_bytes() for s in secret)]
        return found
