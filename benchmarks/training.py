"""birl's forward_backward on synthetic groups, in this process; `shared_prefix` and `ceiling` time it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birl.algorithms.policy import policy_loss
from birl.algorithms.surrogates import clip
from birl.config.schema import Learner as Defaults
from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Stats
from birl.models.load import load_model
from birl.types import Sample

ABSOLUTE, RELATIVE = 1e-5, 1e-4  # tolerances for the effect of packing on a float32 gradient (docs/numerics.md)


def group(number: int, answers: int, prompt: int, tokens: int, vocabulary: int) -> list[Sample]:
    """Answers of `tokens` random tokens to one random prompt, every other one with advantage -1."""
    random = torch.Generator().manual_seed(number)
    ids: list[int] = torch.randint(0, vocabulary, (prompt + answers * tokens,), generator=random).tolist()
    length = prompt + tokens
    return [
        Sample(
            tokens=np.array(ids[:prompt] + ids[prompt + i * tokens : prompt + (i + 1) * tokens], np.int32),
            mask=np.repeat([False, True], [prompt, tokens]),
            logprobs=np.zeros(length, np.float32),
            versions=np.repeat(np.array([-1, 0], np.int32), [prompt, tokens]),
            advantage=(-1.0) ** i,
            group=number,
            episode=i,
        )
        for i in range(answers)
    ]


def apart(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples in separate groups, so that the packer merges no tokens: with experts, the routes would
    differ."""
    return [replace(s, group=i, routes=i.to_bytes(2, "little") * len(s.tokens)) for i, s in enumerate(samples)]


def batches(samples: Sequence[Sample]) -> list[Batch]:
    """Micro-batches of the default size; the loss is the mean over all trained tokens."""
    return pack(samples, [1 / sum(sum(s.mask) for s in samples)] * len(samples), Defaults().tokens_per_microbatch)


def loss(logp: Tensor, entropy: Tensor, batch: Batch, *, on_policy: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss; `on_policy`: for the first update of a batch, when the learner's log-probs are the engine's."""
    return policy_loss(
        logp,
        entropy,
        old_logp=logp.detach() if on_policy else batch.logprobs,
        advantages=batch.advantages,
        sample=batch.sample,
        weights=batch.weights,
        surrogate=partial(clip, clip_low=0.2, clip_high=0.2),
    )


def forward_backward(learner: Learner, work: Sequence[Batch]) -> float:
    """Seconds of the whole gradient, from scratch."""
    for tensor in learner.masters.tensors.values():
        tensor.grad = None
    stats = Stats()
    start = time.perf_counter()
    for batch in work:
        learner.forward_backward(batch, loss, stats)
    return time.perf_counter() - start


def flops(model: Any, work: Sequence[Batch]) -> float:
    """FLOPs of the gradient: two for each multiplication and addition of the products, forward and for the gradients of
    inputs and weights. The head counts only for trained tokens, attention for visible pairs; recomputation does not
    count."""
    layers = model.base_model.layers
    weights = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    width = layers[0].self_attn.q_proj.out_features
    tokens, trained = sum(len(b.tokens) for b in work), sum(len(b.source) for b in work)
    seen = sum(tree.pairs() for b in work for tree in b.trees)
    return 6.0 * (weights * tokens + head * trained + 2 * len(layers) * width * seen)


def gradient_gap(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Compare the gradients in float32, with the prompt shared and not: the largest absolute difference, the largest
    absolute value, and whether all of it is within the documented bounds."""
    learner, found = Learner(load_model(folder), dtype=torch.float32), []
    for work in (batches(samples), batches(apart(samples))):
        forward_backward(learner, work)
        found.append([t.grad for t in learner.masters.tensors.values() if t.grad is not None])
    pairs = list(zip(*found, strict=True))
    return {
        "difference": max((a - b).abs().max().item() for a, b in pairs),
        "largest": max(b.abs().max().item() for _, b in pairs),
        "within": all(torch.allclose(a, b, atol=ABSOLUTE, rtol=RELATIVE) for a, b in pairs),
    }
