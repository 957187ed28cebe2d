"""Plans for GPUs that are not there: by the name of a card, from the model's config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.plan import run as plan
from birl.plan import run_memory as memory
from birl.plan.cluster import KINDS
from birl.plan.run_memory import GIB
from birl.plan.sizes import Load, Module
from tests.tiny import tiny_model, tiny_tokenizer

STEP = Load(microbatch=1000, several=True, sequences=16, group=4, prompt=40, longest=100)
CARD = 80 * GIB


def settings(*words: str) -> schema.RL:
    return load(schema.RL, ["data.train=x.jsonl", "validation.every=0", *words])


def predicted(*words: str, card: int = CARD) -> memory.Phases:
    return memory.predict(tiny_model(), settings(*words), STEP, card)


def qwen(folder: Path, hidden: int, inner: int, layers: int, heads: int) -> Path:
    """config.json of a Qwen2 of 28 heads or so; weights are nowhere."""
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 152064}
    more = {"num_attention_heads": heads, "num_key_value_heads": 4, "max_position_embeddings": 32768}
    about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**shape, **more, **about}))
    return folder


def test_a_gpu_holds_all_of_the_cache_and_each_weight_once() -> None:
    """The cache beside the training, too; it is that of engine.max_batch, whatever is sampled at once."""
    found = predicted("engine.max_batch=32")
    module = Module.of(tiny_model(), "bfloat16", gpu=True)
    for phase in ("generation", "training"):
        assert found[phase]["keys and values"] == 32 * 4 * module.page  # 100 tokens are 4 pages of 32
        assert found[phase]["weights laid out"] == 0
    assert predicted("engine.kv_cache_gb=0.5")["training"]["keys and values"] == GIB // 2
    small = predicted("engine.max_batch=1000000", card=2 * GIB)["training"]["keys and values"]
    assert 0 < small <= GIB // 2, "half of what the weights leave"


def test_what_is_not_on_the_gpu_does_not_count() -> None:
    on_cpu, found = predicted("rollout.max_staleness=2", card=0), predicted("rollout.max_staleness=2")
    for name in ("checkpoint being written", "weights of earlier versions"):
        assert [name in phases["training"] for phases in (on_cpu, found)] == [True, False]
    moved = predicted("optimizer.offload=cpu")["training"]
    assert not moved["weights, float32"] and not moved["optimizer state, float32"] and not moved["gradient, float32"]
    servers = ("engine.kind=vllm", "engine.count=4")
    phases, split = predicted(*servers), predicted(*servers, "engine.tensor_parallel=2")
    assert phases["servers"]["weights, bfloat16"] == 2 * split["servers"]["weights, bfloat16"]
    assert memory.peak(phases, CARD) == max(sum(column.values()) for column in phases.values())


def test_the_largest_that_fits_a_gpu_fits() -> None:
    model, config = tiny_model(), settings()
    found = memory.largest(model, config, STEP, 4 * GIB, 4 * GIB)
    tokens = found["learner.tokens_per_microbatch"]
    peaks = [
        memory.peak(memory.predict(model, config, replace(STEP, microbatch=n), 4 * GIB), 4 * GIB)
        for n in (tokens, tokens + 1)
    ]
    assert peaks[0] <= 4 * GIB < peaks[1] and found["engine.max_batch"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_plan_for_a_named_card(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model.path={qwen(tmp_path, 896, 4864, 24, 14)}", f"device={kind.upper()}", "rollout.max_tokens=64"]
    assert main(["plan", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == kind and found["available"] == int(0.95 * KINDS[kind]["memory"])
    assert found["phases"]["training"]["keys and values"] > 0


def test_a_card_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7.6 billion parameters: 16 bytes each for masters, gradient and AdamW, and 2 for what is computed with."""
    folder = qwen(tmp_path, 3584, 18944, 28, 28)
    assert main(["plan", f"model.path={folder}", "device=h100"]) == 0
    assert "bfloat16, h100" in (page := capsys.readouterr().out) and "This does not fit." in page
    with pytest.raises(BirlError, match=r"AdamW's state need 1[23]\d\.\d GiB of each GPU, and h100 has 70\.8 usable"):
        plan.check(settings(f"model.path={folder}"), "h100")
    plan.check(settings(f"model.path={folder}", "parallel.fsdp=4", "engine.kind=vllm"), "h100")
    plan.check(settings(f"model.path={folder}", "optimizer.offload=cpu"), "h100")
    assert main(["plan", f"model.path={folder}", "device=h1000"]) == 2
    assert "device=h1000: there is no such kind" in (said := capsys.readouterr().err) and "h100" in said


def test_a_dry_run_for_a_card_says_it_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n')
    model = tmp_path / "model"
    model.mkdir()
    qwen(model, 3584, 18944, 28, 28)
    tiny_tokenizer().save_pretrained(model)
    (model / "model.safetensors").write_bytes(b"no weights")
    words = ["rl", f"model.path={model}", "data.train=rows.jsonl", "--dry-run", "device=t4"]
    assert main(words) == 2
    assert "and t4 has 14.2 usable" in capsys.readouterr().err


def test_a_dry_run_plans_for_the_card(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n' * 4)
    words = ["rl", f"model.path={tiny}", "data.train=rows.jsonl", "rollout.max_tokens=8", "reward.functions=[math]"]
    assert main([*words, "--dry-run", "device=l40s"]) == 0
    assert "bfloat16, l40s" in (page := capsys.readouterr().out)
    assert f"{0.95 * 48e9 / GIB:.2f} GiB" in page
