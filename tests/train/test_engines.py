"""Runs whose engines are in other processes: started with the run, or found by name. One core, real servers."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from birl.cli import evaluation
from birl.config import schema
from birl.config.load import load
from birl.engines import attached, names
from birl.engines import servers as engines
from birl.engines.client import Client
from birl.engines.kinds import cores_of
from birl.engines.wire import Info, header
from birl.errors import BirlError, EngineDown
from birl.learner import checkpoint, step_folders
from birl.rollout.ledger import audit
from birl.train import rl
from birl.types import SamplingParams
from birl.weights.canary import Canary
from tests.tiny import tiny_model_folder, tiny_moe_folder
from tests.train.test_rl import log, run

NAME = f"tests/{os.getpid()}"
UNEVEN = ("rollout.max_tokens=40", "rollout.prompts=2", "rollout.group_size=4", "model.dtype=bfloat16")
QUICK = (*UNEVEN, "engine.kind=birl", "weights.timeout=30", "engine.request_timeout=30")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`birl serve` in another shell, as a user would start it; gives the folder that it looks into for weights."""
    volume = tmp_path_factory.mktemp("volume")
    words = [f"model.path={tiny}", "model.dtype=bfloat16", "engine.max_batch=8", "engine.kv_cache_gb=0.01", "threads=1"]
    command = [sys.executable, "-m", "birl", "serve", *words, f"name={NAME}", f"volume={volume}"]
    with (volume / "log").open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 60
            while not names.find(NAME):
                assert child.poll() is None and time.monotonic() < deadline, (volume / "log").read_text()
                time.sleep(0.1)
            yield volume
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
            child.kill()


@pytest.mark.parametrize("method", ["reload", "shared", "direct", "nccl", "ipc", "volume"])
def test_every_method_brings_the_weights(tiny: Path, tmp_path: Path, server: Path, method: str) -> None:
    """The engine samples from what is trained, to the bit: in another process, and while it changes."""
    words = [*QUICK, f"engine.attach=[{NAME}]", f"weights.method={method}", "rollout.max_staleness=2", "steps=4"]
    if method == "volume":
        words.append(f"weights.folder={server}")
    run(tiny, tmp_path, *words)
    steps = log(tmp_path)
    assert [s["weights/gap"] for s in steps] == [0.0] * 4 and all(s["weights/bytes"] > 0 for s in steps)
    assert all(s["mismatch/mean"] in (None, 0.0) for s in steps) and steps[0]["mismatch/mean"] == 0
    assert max(s["staleness/max"] for s in steps) <= 2
    found = audit(tmp_path / "run")
    assert not found.problems and found.tokens["trained"] > 0
    assert not list(Path("/dev/shm").glob(f"birl-weights-{os.getpid()}/v*"))


@pytest.mark.parametrize(
    ("method", "split"),
    [
        *((m, "fsdp") for m in ("reload", "direct", "nccl", "shared", "volume", "checkpoint")),
        ("nccl", "tp"),
        ("nccl", "cp"),
        ("ipc", "fsdp"),
    ],
)
@pytest.mark.usefixtures("forking")
def test_ranks_that_have_parts_of_the_weights_bring_them_too(
    plain: Path, tmp_path: Path, method: str, split: str
) -> None:
    """No rank has the whole model; what the engine says of its own weights is what was gathered."""
    words = [*QUICK, f"weights.method={method}", f"parallel.{split}=2", "model.dtype=float32", "steps=2"]
    run(plain, tmp_path, *words, "data.validation_split=0.2", "validation.every=2")
    steps = log(tmp_path)
    assert len(steps) == 2 and all(s["weights/bytes"] > 0 for s in steps)
    assert max(s["weights/gap"] for s in steps) < 1e-4


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("method", ["reload", "nccl"])
def test_ranks_that_share_out_experts_bring_all_of_them(tmp_path: Path, method: str) -> None:
    words = [*QUICK, f"weights.method={method}", "parallel.fsdp=2", "parallel.ep=2", "model.dtype=float32", "steps=2"]
    run(tiny_moe_folder(tmp_path / "moe"), tmp_path, *words)
    steps = log(tmp_path)
    assert len(steps) == 2 and max(s["weights/gap"] for s in steps) < 1e-5


def test_a_synchronous_run_is_the_same_as_in_one_process(tiny: Path, tmp_path: Path, server: Path) -> None:
    run(tiny, tmp_path / "one", *UNEVEN, "steps=3", "optimizer.lr=0.01")
    run(tiny, tmp_path / "two", *QUICK, "steps=3", "optimizer.lr=0.01", f"engine.attach=[{NAME}]")
    assert log(tmp_path / "one", "rollouts") == log(tmp_path / "two", "rollouts")
    ends = [checkpoint.read_tensors(step_folders.latest(tmp_path / n / "run" / "checkpoints")) for n in ("one", "two")]
    assert all((ends[0][k] == ends[1][k]).all() for k in ends[0])


def test_a_rollout_test_finds_servers_by_name(tiny: Path, tmp_path: Path, server: Path, capsys) -> None:
    """AReaLite's way: servers in one shell, a test of the rollout in another."""
    (tmp_path / "b.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n' * 3)
    words = [f"model.path={tiny}", f"data.validation={tmp_path}/b.jsonl", "validation.max_tokens=8", "threads=1"]
    words += ["engine.kind=birl", f"output={tmp_path}/r.json"]
    evaluation.run(load(schema.Eval, [*words, f"engine.attach=[{NAME}]"]))
    assert "pass@1" in capsys.readouterr().out
    found = __import__("json").loads((tmp_path / "r.json").read_text())
    assert len(found["weights"]) == len(found["data"]) == 32 and len(found["answers"]) == 3
    with pytest.raises(BirlError, match="no server registered this name"):
        evaluation.run(load(schema.Eval, [*words, "engine.attach=[nobody/0]", "engine.start_timeout=0.1"]))
    with pytest.raises(BirlError, match=r"127.0.0.1:9"):
        evaluation.run(load(schema.Eval, [*words, "engine.attach=['http://127.0.0.1:9']"]))


@pytest.mark.parametrize(
    ("number", "threads", "among", "own"),
    [(0, 2, [0, 1, 2, 3, 4], [3, 4]), (1, 2, [0, 1, 2, 3, 4], [1, 2]), (2, 2, [0, 1, 2, 3, 4], [3, 4]),
     (0, 4, [1, 6], [1, 6]), (1, 4, [1, 6], [1, 6]), (1, 1, [1, 6], [1])],
)  # fmt: skip
def test_each_server_has_cores_of_its_own(number: int, threads: int, among: list[int], own: list[int]) -> None:
    assert cores_of(number, threads, among) == own


def test_servers_of_an_evaluation_that_fails_end(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Gone:
        address = "http://127.0.0.1:1"
        remotes = property(lambda self: {self.address: self})

        async def info(self) -> Info:
            raise EngineDown("it has just died")

        async def close(self) -> None:
            closed.append(True)

    async def opened(engine: schema.Engine, wanted: engines.Wanted) -> Gone:
        (wanted.logs / "engine-0.log").write_text("started")
        return Gone()

    monkeypatch.setattr(evaluation, "open_servers", opened)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "b.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n')
    words = [f"model.path={tiny}", f"data.validation={tmp_path}/b.jsonl", "threads=1", "engine.kind=birl"]
    with pytest.raises(EngineDown):
        evaluation.run(load(schema.Eval, words))
    assert closed and not list((tmp_path / "temporary").iterdir())


def test_servers_come_and_go_with_the_run(tiny: Path, tmp_path: Path) -> None:
    before = children()
    run(tiny, tmp_path, *QUICK, "engine.count=2", "rollout.max_staleness=1", "steps=3", "engine.arguments=[seed=5]")
    assert children() == before
    assert len(list((tmp_path / "run" / "engines").glob("*.log"))) == 2
    assert not audit(tmp_path / "run").problems


def test_the_only_server_is_started_again_when_it_ends_before_an_update(tiny: Path, tmp_path: Path) -> None:
    before, killed = children(), []

    def reward(completions: list[str], **_: object) -> list[float]:
        if not killed:
            killed.extend(children() - before)
            for pid in killed:
                os.killpg(int(pid), signal.SIGKILL)
        return [float(len(c)) for c in completions]

    run(tiny, tmp_path, *QUICK, "steps=3", reward=reward)
    assert len(log(tmp_path)) == 3 and len(killed) == 1 and children() == before
    assert not audit(tmp_path / "run").problems


@pytest.mark.usefixtures("forking")
def test_servers_that_are_started_anew_from_each_folder(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, *QUICK, "weights.method=checkpoint", "steps=1")
    assert log(tmp_path)[0]["weights/gap"] == 0
    printed = (tmp_path / "run" / "engines" / "engine-0.log").read_text()
    assert printed.count("birl serve:") >= 3 and "v000001" in printed  # the model, version 0, version 1


def test_servers_sleep_while_the_learner_trains(tiny: Path, tmp_path: Path, server: Path) -> None:
    run(tiny, tmp_path / "a", *QUICK, f"engine.attach=[{NAME}]", "engine.sleep=true", "steps=3")
    run(tiny, tmp_path / "b", *UNEVEN, "steps=3")
    assert log(tmp_path / "a", "rollouts") == log(tmp_path / "b", "rollouts")


@pytest.mark.parametrize(
    ("words", "reason"), [(("model.path={other}",), "vocabulary"), (("model.dtype=float32",), "model.dtype=bfloat16")]
)
def test_servers_that_do_not_fit_are_refused_by_name(
    tiny: Path, tmp_path: Path, server: Path, words: tuple[str, ...], reason: str
) -> None:
    other = tiny_model_folder(tmp_path / "other", vocab=300)
    said = [word.format(other=other) for word in words]
    with pytest.raises(BirlError, match=rf"engine.attach: http://127.*{reason}"):
        run(tiny, tmp_path, *QUICK, f"engine.attach=[{NAME}]", *said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_of_another_kind_is_named(tiny: Path, tmp_path: Path, server: Path, kind: str) -> None:
    words = (f"engine.kind={kind}", f"engine.attach=[{names.find(NAME)[0]}]", f"weights.folder={tmp_path}")
    with pytest.raises(BirlError, match=r"http://127\S* is a server of birl: set engine\.kind=birl\."):
        run(tiny, tmp_path, *UNEVEN, *words)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, ""),
        ({"context": 95}, "rollout.max_tokens"),
        ({"volume": ""}, "volume=/weights"),
        ({"volume": "/elsewhere"}, "/elsewhere"),
        ({"dtype": "float32"}, "model.dtype=float32"),
        ({"vocabulary_digest": "other"}, "vocabulary"),
        ({"paused": True}, "paused"),
        ({"asleep": True}, "asleep"),
    ],
)
def test_what_a_server_must_have(told: dict[str, object], reason: str) -> None:
    limits = {"context": 512, "longest": 96, "kv_cache_gb": 1.0, "end_ids": frozenset({2})}
    wanted = engines.Wanted(
        folder=Path("m"),
        dtype="bfloat16",
        device="cpu",
        logs=Path("l"),
        vocabulary_digest="w",
        volume="/weights",
        **limits,
    )
    state = {"engine": "birl", "model": "m", "version": 0, "digest": "d", "dtype": "bfloat16", "context": 96}
    state |= {"vocabulary": 320, "running": 0, "waiting": 0, "paused": False, "asleep": False, "pid": 1}
    found = attached.unfit(
        schema.Engine(kind="birl"),
        wanted,
        "http://127.0.0.1:1",
        Info(**state | {"vocabulary_digest": "w", "volume": "/weights"} | told),
    )
    assert reason in found and bool(reason) == bool(found)


def test_two_runs_do_not_share_a_server(tiny: Path, tmp_path: Path, server: Path) -> None:
    (address,) = names.find(NAME)
    with httpx.Client(base_url=address, headers=header("elsewhere:/runs/first")) as first:
        first.post("/claim").raise_for_status()
        with pytest.raises(BirlError, match="elsewhere:/runs/first"):
            run(tiny, tmp_path, *QUICK, f"engine.attach=[{NAME}]")
        first.post("/release").raise_for_status()
    run(tiny, tmp_path, *QUICK, f"engine.attach=[{NAME}]")
    assert not httpx.get(f"{address}/info").json()["run"], "a run that is over leaves it free"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_asked_of_a_server_that_was_given_back(
    tiny: Path, tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The proof of the last weights is still under way when the run ends."""
    asked: list[str] = []
    ask = Client._json

    async def told(self: Client, method: str, path: str, **keys: Any) -> dict[str, Any]:
        asked.append(path)
        return await ask(self, method, path, **keys)

    async def check(self: Canary, engine: Any, name: str) -> float:
        while len(self.past) > 0:  # never over
            await engine.generate((3, 4, 5), SamplingParams(max_tokens=1))
        return 0.0

    def failing(*_: object) -> None:
        raise BirlError("the run fails")

    monkeypatch.setattr(Client, "_json", told)
    monkeypatch.setattr(Canary, "check", check)
    if fails:
        monkeypatch.setattr(rl, "step_metrics", failing)
    with pytest.raises(BirlError, match="the run fails") if fails else contextlib.nullcontext():
        run(tiny, tmp_path, *QUICK, "steps=1", f"engine.attach=[{NAME}]")
    assert asked.count("/release") == 1 and asked[-1] == "/release"
    (address,) = names.find(NAME)
    assert not httpx.get(f"{address}/info").json()["run"]


def test_a_server_that_does_not_start_says_why(tiny: Path, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(BirlError, match="max_batchh") as caught:
        run(tiny, tmp_path, *QUICK, "engine.arguments=[engine.max_batchh=3]")
    assert "engine-0.log" in str(caught.value) and children() == before


def test_what_servers_are_started_with(tiny: Path, tmp_path: Path) -> None:
    wanted = engines.Wanted(
        folder=tiny,
        dtype="bfloat16",
        device="cpu",
        context=512,
        longest=64,
        kv_cache_gb=0.5,
        end_ids=frozenset({2}),
        logs=tmp_path,
        volume="/shared",
    )
    common = {"python": sys.executable, "threads": 3, "max_batch": 7, "arguments": ["--more"], "start_timeout": 9.0}
    cases = {
        "birl": ("serve", "engine.max_batch=7", "threads=3", "volume=/shared", "engine.kv_cache_gb=0.5000"),
        "vllm": ("--tensor-parallel-size 2", "--pipeline-parallel-size 3", "--max-num-seqs 7", "--max-model-len 512"),
        "sglang": ("--tp-size 2", "--pp-size 3", "--max-running-requests 7", "--context-length 512", "--device cpu"),
    }
    for kind, parts in cases.items():
        config = schema.Engine(kind=kind, tensor_parallel=2, pipeline_parallel=3, restarts=4, **common)  # type: ignore[arg-type]
        remote = engines.speak(config, wanted, "http://127.0.0.1:5555", "secret")
        process = engines.child(config, wanted, remote, 5555, "secret", 0)
        said = " ".join(process.command)
        assert said.startswith(sys.executable) and said.endswith("--more") and "5555" in said
        assert all(part in said for part in parts), said
        assert process.start_timeout == 9 and process.max_restarts == 4
        assert "secret" not in said or kind == "sglang"  # SGLang takes it as a word only


def children() -> set[str]:
    """Processes of this one, by number."""
    return set(subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split())
