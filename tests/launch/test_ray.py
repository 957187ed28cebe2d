"""`birl launch ray` on a real cluster of several nodes on this machine, some of which are lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birl.cli import main
from birl.engines import names
from birl.errors import BirlError
from birl.launch import ray as launcher
from birl.launch import ray_supervisor
from birl.launch.job import derive, given
from birl.launch.launcher import WHERE
from birl.launch.ray_host import Host, Order, RayPlan, Seen, Spot, bundles
from birl.launch.ray_supervisor import Supervisor

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
#: those that run without `make drill-ray`
SHORT = ("engine_node", "collectors", "token")
WORDS = ["model.path=m", "data.train=rows.jsonl", "engine.kind=birl", "engine.count=2"]

needs_ray = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make setup-ray")
needs_engine = pytest.mark.skipif(find_spec("birl.launch.engine") is None, reason="no birl.launch.engine")
long = pytest.mark.skipif(not os.environ.get("BIRL_DRILL"), reason="takes a minute: make drill-ray")


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a scenario of `ray_drill.py` gives. All that are wanted run one after the other in one cluster."""

    @cache
    def played() -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ray")
        chosen = [] if os.environ.get("BIRL_DRILL") else SHORT
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        words = [str(PYTHON), "-m", "tests.launch.ray_drill", str(folder), *chosen]
        child = subprocess.Popen(
            words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, wrong = child.communicate(timeout=880 if os.environ.get("BIRL_DRILL") else 380)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        assert child.returncode == 0, wrong[-3000:]
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
        return {line["scenario"]: line for line in lines}

    def one(name: str) -> dict[str, Any]:
        found = played()[name]
        assert "error" not in found, found["error"]
        return found

    return one


def closed(found: dict[str, Any]) -> None:
    """Every step once and none left out, no secret on disk, and the ledger closes."""
    assert found["steps"] == list(range(1, len(found["steps"]) + 1)), found["told"]
    assert found["secret"] == []
    assert found.get("problems", []) == []


@needs_ray
@needs_engine
def test_an_engine_whose_node_is_lost_runs_elsewhere(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("engine_node")
    closed(found)
    assert found["state"] == "stopped"
    assert found["named"] == ["birl:engine-node", "birl:engine-node:engine:0", "birl:engine-node:learner:0"]
    assert "learner 0      running" in found["status"]
    told = "\n".join(found["told"])
    assert "engine 0 is lost" in told and "engine 0 starts on node" in told
    assert "learner 0 is lost" not in told and "(start 2)" in told
    assert "learner 0| " in found["log"]


@needs_ray
@long
@pytest.mark.timeout(900)
def test_ranks_on_two_nodes_go_on_when_one_is_killed(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("ranks")
    closed(found)
    assert found["state"] == "done" and found["steps"][-1] == 40
    assert any("learner 1 was ended by signal 9" in line for line in found["told"])


@needs_ray
@long
@pytest.mark.timeout(900)
def test_a_mistake_is_not_tried_again(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("mistake")
    assert found["state"] == "failed" and "empty.jsonl" in found["why"]
    assert sum("starts on node" in line for line in found["told"]) == 1


@needs_ray
def test_environments_in_actors_grow_and_shrink(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("collectors")
    assert found["rows"] > 0
    assert (found["grown"], found["waiting"]) == (2, 2)  # 6 episodes, room for 4
    assert found["lost"] == 1 and found["shrunk"] == 1
    lost = [e for e in found["episodes"] if "was lost" in e]
    assert len(lost) == 2 and all(e.startswith("birl:") for e in found["episodes"] if e not in lost)


@needs_ray
def test_who_has_no_token_does_not_come_in(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("token")
    assert found["wrong"][0] == 3 and "that takes this token" in found["wrong"][1]
    assert found["open"][0] == 3 and "launch.without_token" in found["open"][1]


@needs_ray
@needs_engine
@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", ["learner_node", "supervisor", "scale", "environments", "head"])
def test_longer_drills(drill: Callable[[str], dict[str, Any]], scenario: str) -> None:
    found = drill(scenario)
    closed(found)
    assert found["state"] in ("done", "stopped")
    assert found.get("same", True)


@needs_ray
@long
@pytest.mark.timeout(900)
def test_a_job_that_fits_nowhere_says_so(drill: Callable[[str], dict[str, Any]]) -> None:
    found = drill("no_room")
    assert found["state"] == "failed" and "launch.start_timeout=3" in found["why"] and "CPU" in found["why"]


def test_what_would_be_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    keys = ["launch.gpus=1", "launch.nodes=3", "launch.env=[HF_TOKEN]", "launch.memory_gb=2", "run=runs/x"]
    assert main(["launch", "ray", "rl", *WORDS, "parallel.fsdp=2", *keys, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert '"strategy": "SPREAD"' in text and text.count('"GPU": 1') == 4 and text.count('"memory": 2147483648') == 4
    assert "birl:x:learner:1" in text and "birl:x:engine:1" in text and "secret-value" not in text
    assert "ray" in WHERE


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(BirlError, match=r"launch\.env: NOT_THERE is not set"):
        given(("NOT_THERE",))


def test_a_plan_shows_no_secret() -> None:
    job = derive("rl", [*WORDS, "run=runs/x"], launcher.Keys())
    plan = RayPlan(job=job, folder="/", env={"KEY": "canary"}, token="canary")
    order = Order(command=("true",), folder="/", log="x", generation=1, env={"KEY": "canary"})
    assert "canary" not in repr(plan) + repr(order)
    assert bundles(job) == [{"CPU": 1}] * 3


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_JOB_ID", "7")
    made = Host({"ip": "127.0.0.1", "node": "n1", "gcs": "127.0.0.1:1"})
    yield made
    made.leave()


def until(done: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def order(folder: Path, script: str, **more: Any) -> Order:
    return Order(command=(sys.executable, "-c", script), folder=str(folder), log="a/b.log", **{"generation": 1, **more})


def test_a_host_says_how_its_process_ended(host: Host, tmp_path: Path) -> None:
    assert not host.look().running and host.read(0) == ("", 0)
    script = "import os, sys; print(os.environ['A'], os.environ.get('RAY_JOB_ID')); print('the end'); sys.exit(3)"
    host.begin(order(tmp_path, script, env={"A": "given"}))
    until(lambda: host.look().code is not None)
    assert (host.look().code, host.look().last, host.look().generation) == (3, "the end", 1)
    text, after = host.read(0)
    assert text == "given None\nthe end\n" and host.read(after) == ("", after)
    assert host.read(-4)[0] == "end\n"
    host.begin(Order(command=("true",), folder=str(tmp_path / "missing"), log="/dev/full/x", generation=2))
    assert host.look().code == 127 and "launch.folder" in host.look().last


def test_a_log_is_read_in_whole_characters(host: Host, tmp_path: Path) -> None:
    host.begin(order(tmp_path, "pass"))
    (tmp_path / "a" / "b.log").write_bytes("aé€".encode() + b"\xe2\x82")  # the rest is still to be written
    parts, place = list[str](), 0
    while (found := host.read(place, 2 if not parts else 4))[0]:
        parts, place = [*parts, found[0]], found[1]
    assert parts == ["a", "é", "€"] and place == 6


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Of a learner and two engines that run, without a cluster; what it tells them is in `signals` of their hosts."""
    monkeypatch.setattr(ray_supervisor, "library", lambda: SimpleNamespace(kill=lambda host: None))
    monkeypatch.setattr(Supervisor, "_live", lambda self: None)
    job = derive("rl", [*WORDS, "run=runs/x"], launcher.Keys())
    made = Supervisor(RayPlan(job=job, folder="/"))
    for role, index in ((job.roles[0], 0), (job.roles[1], 0), (job.roles[1], 1)):
        spot = Spot(role=role, index=index, name=f"{role.name}:{index}", place={}, up=True, generation=1)
        spot.host = SimpleNamespace(signals=[])
        spot.host.signal = SimpleNamespace(remote=spot.host.signals.append)
        spot.seen = Seen(ip="10.0.0.1", node="n1", gcs="x", pid=7, generation=1)
        made.spots.append(spot)
    made.wanted = 2
    return made


def test_an_engine_that_leaves_is_replaced_where_more_are_wanted_again(supervisor: Supervisor) -> None:
    """It is no more among those that the learner finds, so it must not count as one."""
    last = supervisor.engines[1]
    supervisor.scale(1)
    supervisor._scale()
    supervisor.scale(2)
    last.after = 0.0
    for _ in range(2):
        supervisor._scale()
        assert supervisor.engines[1] is last and last.leaving
        last.after = 0.0
    assert last.host.signals == [signal.SIGTERM, signal.SIGKILL] and last.seen is not None
    last.seen = replace(last.seen, code=0)
    supervisor._scale()
    assert [spot.index for spot in supervisor.engines] == [0, 1] and supervisor.engines[1] is not last


@pytest.mark.parametrize(("code", "waits"), [(2, True), (25, False), (255, False), (1, False)])
def test_only_code_2_is_a_mistake(supervisor: Supervisor, code: int, waits: bool) -> None:
    (learner,) = supervisor.learners
    assert learner.seen is not None
    learner.seen = replace(learner.seen, code=code, last="no")
    supervisor._learner("")
    assert (supervisor.after - time.monotonic() > 5) is waits and not supervisor.verdict


@pytest.mark.parametrize("code", [0, 130, 143])
def test_a_learner_that_was_told_to_save_is_stopped_and_did_not_fail(supervisor: Supervisor, code: int) -> None:
    (learner,) = supervisor.learners
    assert learner.seen is not None
    supervisor.stopping = True
    learner.seen = replace(learner.seen, code=code, last="no")
    supervisor._learner("")
    assert (supervisor.verdict, supervisor.failures) == ("stopped", 0)


def test_neighbouring_ranks_are_on_one_node(supervisor: Supervisor) -> None:
    """Ray places neighbours on different nodes (SPREAD), and the ranks of parallel.tp are neighbours."""
    (learner,) = supervisor.learners
    nodes, begun = ["n1", "n2", "n2", "n1"], list[Any]()
    spots = [replace(learner, index=index, name=f"learner:{index}") for index in range(4)]
    for spot, node in zip(spots, nodes, strict=True):
        host = {name: SimpleNamespace(remote=told) for name, told in (("port", lambda: 7), ("begin", begun.append))}
        spot.host, spot.seen = SimpleNamespace(**host), Seen(ip=f"10.0.0.{node[1]}", node=node, gcs="x")
    supervisor.ray.get = lambda value, timeout: value
    supervisor._introduce = lambda first: None  # type: ignore[method-assign]
    supervisor._start(spots)
    ranks = {order.log[-5]: order.env["RANK"] for order in begun}
    assert ranks == {"0": "0", "3": "1", "1": "2", "2": "3"}
    assert {order.env["MASTER_ADDR"] for order in begun} == {"10.0.0.1"}


def test_a_host_ends_what_its_process_has_started(host: Host, tmp_path: Path) -> None:
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    host.begin(order(tmp_path, script))
    until(lambda: host.read(0)[0].strip())
    grandchild = int(host.read(0)[0])
    assert host.look().running
    host.signal(signal.SIGKILL)
    assert host.look().code == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{grandchild}").exists() or "Z" in Path(f"/proc/{grandchild}/stat").read_text())


def test_the_learners_node_knows_the_engines(host: Host, tmp_path: Path) -> None:
    """Without a file system in common."""
    host.introduce("birl-launch/x", ("http://10.0.0.1:1", "http://10.0.0.2:2"))
    assert names.find("birl-launch/x") == ["http://10.0.0.1:1", "http://10.0.0.2:2"]
    host.introduce("birl-launch/x", ("http://10.0.0.2:2", "http://10.0.0.3:3"))
    assert names.find("birl-launch/x") == ["http://10.0.0.2:2", "http://10.0.0.3:3"]
    host.leave()
    assert names.find("birl-launch/x") == []
    host.begin(order(tmp_path, "import time; time.sleep(60)", name="birl-launch/x.engine-0.1"))
    assert host.look().address == ""
    entry = names.register("birl-launch/x.engine-0.1", "http://10.0.0.9:9", os.getpid(), "")
    assert host.look().address == "http://10.0.0.9:9"
    names.forget(entry)
