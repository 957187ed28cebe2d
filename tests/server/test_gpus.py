"""Servers of a run have GPUs of their own, those that the learner leaves; the cards are faked."""

import asyncio
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from birl.config import schema
from birl.config.load import load
from birl.engines import servers as engines
from birl.engines.birl import serve_words
from birl.engines.kinds import shares
from birl.errors import BirlError
from birl.launch.job import derive
from birl.launch.modal_plan import Keys, prepare
from birl.learner.policy import load_policy
from birl.parallel.grid import ranks_here
from birl.process import Process
from tests.parallel.test_devices import cards

RECIPE = Path(__file__).parents[2] / "recipes/gpu/areal_gsm8k.yaml"


@pytest.mark.parametrize(
    ("visible", "keys", "learner", "expected"),
    [
        (None, {"count": 2}, 1, [("1",), ("2",)]),
        ("7,GPU-5f,3,1", {"count": 1, "tensor_parallel": 2}, 2, [("3", "1")]),
        (None, {"count": 2, "tensor_parallel": 1, "pipeline_parallel": 2}, 0, [("0", "1"), ("2", "3")]),  # birl eval
        (None, {"count": 4, "sleep": True}, 4, [("0",), ("1",), ("2",), ("3",)]),  # they take turns with the learner
        ("6,5,4,3,2", {"count": 1}, 3, [("3",)]),  # of which four are there
    ],
)
def test_servers_have_gpus_behind_the_learners(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    keys: dict[str, int],
    learner: int,
    expected: list[tuple[str, ...]],
) -> None:
    cards(monkeypatch, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert shares(schema.Engine(kind="vllm", **keys), "auto", learner) == expected  # type: ignore[arg-type]


def test_of_rocms_two_settings_hips_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that was given the other one only would see, and take, the learner's first GPU; vLLM would not start."""
    cards(monkeypatch, 3)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,6,7")
    engine = schema.Engine(kind="vllm", count=2, python=sys.executable)
    assert shares(engine, "auto", 1) == [("6",), ("7",)]
    with pytest.raises(BirlError, match=r"this machine shows 3 \(HIP_VISIBLE_DEVICES=4,6,7\)"):
        shares(replace(engine, count=3), "auto", 1)
    limits = {"context": 64, "longest": 64, "kv_cache_gb": 0.01, "end_ids": frozenset({2})}
    wanted = engines.Wanted(folder=Path("model"), dtype="float32", device="auto", logs=tmp_path, **limits)  # type: ignore[arg-type]
    remote = engines.speak(engine, wanted, "http://127.0.0.1:5555", "")
    env = engines.child(engine, wanted, remote, 5555, "", 0, ("6",)).env
    assert {env[name] for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")} == {"6"}


def test_a_learner_on_a_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take the others, or that one in turns; one that sees a single GPU has it at index 0."""
    cards(monkeypatch, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,5,4")
    engine = schema.Engine(kind="birl", count=2)
    assert shares(engine, "cuda:1", 1) == [("6",), ("4",)]
    assert shares(replace(engine, sleep=True), "cuda:1", 1) == [("5",), ("6",)]
    limits = {"context": 64, "longest": 64, "kv_cache_gb": 0.01, "end_ids": frozenset({2})}
    wanted = engines.Wanted(folder=Path("model"), dtype="float32", device="cuda:1", logs=Path("logs"), **limits)  # type: ignore[arg-type]
    assert "model.device=cuda" in serve_words(engine, wanted)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = schema.Engine(kind="vllm", count=2, tensor_parallel=2)
    with pytest.raises(BirlError) as caught:
        shares(config, "auto", 1)
    assert "2 x 2 GPUs for vllm servers beside the learner's 1 are 5" in str(caught.value)
    assert "this machine shows 4 (CUDA_VISIBLE_DEVICES=0,1,2,3)" in str(caught.value)
    assert "engine.sleep=true" in str(caught.value)
    assert shares(config, "cpu", 1) == [(), ()]
    cards(monkeypatch, 0)
    assert shares(config, "auto", 1) == [(), ()]


def test_the_recipe_with_servers_fits_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(schema.RL, [str(RECIPE)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cards(monkeypatch, 8)  # as its expected.yaml says
    assert shares(config.engine, config.model.device, ranks_here(config)) == [("4",), ("5",), ("6",), ("7",)]
    cards(monkeypatch, 7)
    with pytest.raises(BirlError, match=r"4 x 1 GPUs for sglang servers beside the learner's 4 are 8, .* shows 7"):
        shares(config.engine, config.model.device, ranks_here(config))


def test_a_container_with_servers_inside_has_their_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    keys = Keys(engines="inside", vllm="vllm==0.32.0")
    words = ["data.train=my.jsonl", "run=runs/demo", "engine.kind=vllm"]
    gpu = [
        prepare(derive("rl", [*words, *more], keys), keys).settings.learner.gpu for more in ([], ["engine.sleep=true"])
    ]
    assert gpu == ["A100:2", "A100"]


def test_each_server_process_sees_its_own(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    """Real processes, which do nothing; that servers answer is tested elsewhere."""
    cards(monkeypatch, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    torchruns = {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    assert _torchelastic_use_agent_store()  # vLLM's workers would wait for a store that none of them starts
    config = schema.Engine(kind="birl", count=2, threads=1, max_batch=2)
    limits = {"context": 64, "longest": 64, "kv_cache_gb": 0.01, "end_ids": frozenset({2})}
    wanted = engines.Wanted(folder=tiny, dtype="float32", device="auto", logs=tmp_path, **limits)  # type: ignore[arg-type]
    code = "import json, os, sys, time; json.dump(dict(os.environ), open(sys.argv[1], 'w')); time.sleep(60)"
    found: list[dict[str, str]] = []

    async def started(_: schema.Engine, children: Sequence[Process]) -> None:
        for number, child in enumerate(children):
            path = tmp_path / f"{number}.json"  # /proc/PID/environ is another's, or empty, until exec has ended

            async def ready(path: Path = path) -> bool:
                return path.exists() and path.read_text().endswith("}")

            child.command, child.ready = [sys.executable, "-c", code, str(path)], ready
            await child.start()
            found.append(json.loads(path.read_text()))
        raise BirlError("that is all")

    monkeypatch.setattr(engines, "start", started)
    with pytest.raises(BirlError, match="that is all"):
        asyncio.run(engines.open_servers(config, wanted, learner=1))
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["GPU-b", "GPU-c"]
    assert not any(torchruns.keys() & one.keys() for one in found)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 64),
        (("rollout.prompts=128", "rollout.group_size=8"), 512),  # over two servers
        (("rollout.prompts=64", "rollout.group_size=4", "rollout.max_staleness=2"), 384),  # of three steps
        (("rollout.prompts=128", "rollout.group_size=8", "engine.max_batch=16"), 16),
        (("rollout.prompts=512", "rollout.group_size=16"), 1024),
    ],
)
@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--max-num-seqs"), ("sglang", "--max-running-requests")])
def test_servers_decode_what_the_run_asks_at_once(
    tiny: Path, tmp_path: Path, kind: str, flag: str, words: tuple[str, ...], expected: int
) -> None:
    asked = ["data.train=x.jsonl", f"model.path={tiny}", "rollout.prompts=4", "rollout.group_size=4", *words]
    config = load(schema.RL, [*asked, f"engine.kind={kind}", "engine.count=2", f"engine.python={sys.executable}"])
    with ThreadPoolExecutor(1) as compute:
        wanted = engines.wanted(config, load_policy(config.model, compute), 512, [(30, 30)], tmp_path)
    remote = engines.speak(config.engine, wanted, "http://127.0.0.1:5555", "")
    command = engines.child(config.engine, wanted, remote, 5555, "", 0).command
    assert command[command.index(flag) + 1] == str(expected)
