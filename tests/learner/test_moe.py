"""Mixture-of-experts models on one process: what holds for dense models holds for them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from birl.data.pack import pack
from birl.learner import checkpoint
from birl.learner.export import export
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.load import load_model, load_tokenizer, save_hf_config
from birl.models.verify import verify
from birl.weights.folder import write
from birl.weights.publisher import released
from tests.data.test_pack import groups
from tests.engine.test_engine import PROMPTS, Bench, seeded
from tests.parallel.test_learner import reinforce
from tests.tiny import tiny_moe, tiny_moe_folder

PUBLISHED = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
}


@pytest.fixture(scope="module", params=PUBLISHED)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe_folder(tmp_path_factory.mktemp("moe") / "model", kind)


def stepped(learner: Learner, max_tokens: int = 80, seed: int = 3) -> float:
    """One optimizer step on generated groups; the gradient norm."""
    samples = groups(seed)
    work = pack(samples, [1 / len(samples)] * len(samples), max_tokens)
    learner.learn([(batch, reinforce) for batch in work], Stats())
    return learner.optim_step(1e-2)


def test_experts_on_disk_are_one_by_one_and_in_the_model_together(folder: Path, kind: str) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert PUBLISHED[kind] in file.keys()  # noqa: SIM118  safetensors' file is no mapping
    model = load_model(folder)
    verify(model)
    for name, parameter in tiny_moe(kind).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_what_was_trained_goes_back_to_the_published_format(folder: Path, kind: str, tmp_path: Path) -> None:
    learner = Learner(load_model(folder), dtype=torch.float32)
    assert stepped(learner) > 0
    save_hf_config(learner.model, load_tokenizer(folder), tmp_path / "run/model")
    saved = checkpoint.save(tmp_path / "run/checkpoints", 1, learner.tensors(), {})
    export(saved, tmp_path / "run", tmp_path / "out", torch.float32)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert PUBLISHED[kind] in file.keys()  # noqa: SIM118
    exported: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        found, before = exported(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(found, learner.model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    assert (found - before).abs().max() > 0.01


def test_engines_of_others_get_each_expert_by_itself(folder: Path, kind: str, tmp_path: Path) -> None:
    model = load_model(folder)
    sent = released(model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sent.keys() == set(file.keys())
    written = write(tmp_path, 1, sent, folder)
    again = load_model(written)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_engine_and_learner_agree(folder: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(folder, compute)
    stepped(bench.learner)
    completions = bench.generate(PROMPTS, seeded(len(PROMPTS)))
    assert bench.gap(PROMPTS, completions).abs().max() <= 1e-5


@pytest.mark.parametrize(("max_tokens", "checkpointing"), [(200, False), (80, True)])
def test_what_bounds_the_memory_changes_no_gradient(kind: str, max_tokens: int, checkpointing: bool) -> None:
    first, second = made(kind), made(kind, checkpointing)
    assert stepped(second, max_tokens) == pytest.approx(stepped(first), rel=1e-5)
    for name, weight in first.weights().items():
        torch.testing.assert_close(second.weights()[name], weight, atol=1e-5, rtol=1e-5)


def made(kind: str, checkpointing: bool = False) -> Learner:
    model = tiny_moe(kind)
    model.set_attn_implementation(attention.NAME)
    return Learner(model, dtype=torch.float32, gradient_checkpointing=checkpointing)
