"""What only a card can show: each architecture's kernels and graphs are right in bfloat16, and whole runs learn there.
Skipped without one; `python -m pytest tests/gpu tests/models tests/engine -n 8` on a machine with a card."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from birl.data.pack import pack
from birl.engine import graphs
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner
from birl.models import twin
from birl.models.verify import verify
from birl.types import Completion, Sample, SamplingParams
from tests.families import FAMILIES, family
from tests.tiny import tiny_tokenizer
from tests.train.test_rl import log, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PROMPTS = [tuple(range(5, 5 + n)) for n in (1, 4, 9, 17, 30, 70)]
SHAPE = {
    "hidden_size": 256,
    "head_dim": 64,
    "initializer_range": 0.05,
}  # rounding in bfloat16 stays below what is asked


def generated(learner: Learner, compute: ThreadPoolExecutor) -> list[Completion]:
    engine = EmbeddedEngine(
        learner.model, tiny_tokenizer(), end_ids=frozenset({2}), context=128, compute=compute, version=lambda: 0,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=40, seed=i, temperature=1.0, ignore_eos=True) for i in range(len(PROMPTS))]

    async def main() -> list[Completion]:
        answers = await asyncio.gather(*map(engine.generate, PROMPTS, params))
        assert not engine.runner.eager, engine.runner.eager
        await engine.close()
        return answers

    return asyncio.run(asyncio.wait_for(main(), 300))


def gap(learner: Learner, answers: list[Completion]) -> torch.Tensor:
    """Learner's log-prob - engine's, of each token."""
    samples = [
        Sample(
            tokens=np.append(np.array(p, np.int32), c.tokens), mask=np.repeat([False, True], [len(p), len(c.tokens)]),
            logprobs=np.append(np.zeros(len(p), np.float32), c.logprobs),
            versions=np.zeros(len(p) + len(c.tokens), np.int32), advantage=1.0, group=i, episode=0,
        )
        for i, (p, c) in enumerate(zip(PROMPTS, answers, strict=True))
    ]  # fmt: skip
    return torch.cat([learner.forward(b).cpu() - b.logprobs for b in pack(samples, [1.0] * len(samples), 512)])


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_on_the_card(
    kind: str, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It passes the check of its architecture; graphs give the tokens of eager steps, bit for bit, and log-probs that
    are the learner's but for rounding."""
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    verify(family(kind, device="cuda", **SHAPE), torch.bfloat16)
    learner = Learner(family(kind, device="cuda", **SHAPE), dtype=torch.bfloat16)
    captured = generated(learner, compute)
    assert gap(learner, captured).abs().mean() < 0.02
    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: work)
    eager = generated(learner, compute)
    assert [c.ids for c in captured] == [c.ids for c in eager]
    assert [c.logprobs.tolist() for c in captured] == [c.logprobs.tolist() for c in eager]


RUNS = {
    "in turns": (),
    "float32": ("model.dtype=float32",),
    "ahead": ("rollout.max_staleness=2",),
    "lora": ("lora.rank=8", "optimizer.lr=2e-2"),
    "nf4": ("lora.rank=8", "lora.quantize=nf4", "optimizer.lr=2e-2"),
    "int8": ("lora.rank=8", "lora.quantize=int8", "optimizer.lr=2e-2"),
    "adamw8bit": ("optimizer.kind=adamw8bit",),
    "muon": ("optimizer.kind=muon",),
    "offload": ("optimizer.offload=cpu",),
    "checkpointing": ("learner.gradient_checkpointing=true", "learner.tokens_per_microbatch=120"),
    "truncated": ("rollout.top_p=0.9", "rollout.top_k=60", "rollout.min_p=0.01"),
    "ppo": ("algorithm=ppo", "algorithm.kl_coef=0", "algorithm.kl=k3", "algorithm.kl_in=loss", "critic.lr=3e-3"),
    "a reference": ("algorithm=grpo", "algorithm.kl_coef=0.001"),
    "several updates": ("algorithm=dapo", "algorithm.overlong_buffer=0", "algorithm.updates_per_batch=2", "steps=20"),
    "a server that sleeps": ("engine.kind=birl", "engine.sleep=true"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_learns_on_the_card(tiny: Path, tmp_path: Path, case: str) -> None:
    words = ("model.device=cuda", "model.dtype=bfloat16", "steps=30", "rollout.group_size=8", *RUNS[case])
    run(tiny, tmp_path, *words)
    steps = log(tmp_path)
    rewards = [step["reward/mean"] for step in steps]
    gaps = [step["mismatch/mean"] for step in steps if step["mismatch/mean"] is not None]  # none: no group had a signal
    assert gaps and max(gaps) < 0.05
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def test_a_run_on_the_card_goes_on(tiny: Path, tmp_path: Path) -> None:
    words = ("model.device=cuda", "model.dtype=bfloat16", "checkpoint.every=2")
    run(tiny, tmp_path, *words, "steps=2")
    run(tiny, tmp_path, *words, "steps=4", "resume=auto")
    assert [step["step"] for step in log(tmp_path)] == [1, 2, 3, 4]
