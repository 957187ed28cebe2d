"""Two updates on episodes of several turns against the papers' formulas: loss and gradient in float64, of the recorded
rollouts, by transformers' own model, one sequence at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from birl.learner.learner import Learner
from tests.train.test_rl import log, run

WORLD = """
from birl.types import Feedback, Message

class World:
    def __init__(self, task):
        self.task, self.turn = task, 0
    async def start(self):
        return self.task.prompt
    async def step(self, reply):
        self.turn += 1
        n = sum(map(ord, reply.content))
        told = (Message(role="user", content="again " * (1 + n % 3)),)
        return Feedback(messages=told, reward=n % 7 / 7, done=n % 5 == 0)
    async def close(self):
        pass
"""
GAMMA, LAM, KL = 0.9, 0.8, 0.1
KEYS = {
    "echo": ("algorithm=echo", "algorithm.observation_coef=0.3"),
    "turn_gae": ("algorithm=ppo", "algorithm.advantage=turn_gae", f"algorithm.kl_coef={KL}", f"critic.gamma={GAMMA}",
                 f"critic.lam={LAM}", "critic.whiten=false", "critic.lr=1e-2"),
}  # fmt: skip

Weights = dict[str, Tensor]


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.get_input_embeddings().padding_idx = None

    def __call__(self, weights: Weights, tokens: list[int], places: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens at these places [N], and the hidden states before them [N, H]."""
        ids, before = torch.tensor([tokens]), torch.tensor(places) - 1
        own = {n: w for n, w in weights.items() if n != "score.weight"}
        given = {"use_cache": False, "output_hidden_states": True}
        out = functional_call(self.model, own, (ids,), given, tie_weights=True)  # type: ignore[arg-type]
        logp = out.logits[0, before].log_softmax(-1).gather(1, ids[0, before + 1][:, None])[:, 0]
        return logp, out.hidden_states[-1][0, before]


def turns_of(sample: dict[str, Any]) -> list[list[int]]:
    """Places of each turn's trained tokens."""
    mask, result = sample["mask"], []
    for t, trained in enumerate(mask):
        if trained and not mask[t - 1]:
            result.append([])
        if trained:
            result[-1].append(t)
    return result


def by_group(episodes: list[dict[str, Any]]) -> list[list[float]]:
    """GRPO, arXiv:2402.03300 section 4.1: of each turn its episode's."""
    result = []
    for e in episodes:
        rewards = torch.tensor([o["reward"] for o in episodes if o["group"] == e["group"]], dtype=torch.float64)
        advantage = (e["reward"] - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        result.append([advantage.item()] * len(turns_of(e["samples"][0])))
    return result


def by_turn(episodes: list[dict[str, Any]], reference: Reference, first: Weights, critic: Weights) -> list[list[float]]:
    """GAE, arXiv:1506.02438 eq. 16, a step being a turn: its reward less the KL (k1) of its tokens, and the value of
    the state before its first token."""
    result = []
    for e in episodes:
        sample, advantages, after, following = e["samples"][0], [], 0.0, 0.0
        earned = [turn["reward"] for turn in e["turns"]] or [e["reward"]]
        earned[-1] += e["reward"] - sum(earned)  # of the reward function, for the last reply
        for places, reward in reversed(list(zip(turns_of(sample), earned, strict=True))):
            (logp, _), (_, states) = (reference(w, sample["tokens"], places) for w in (first, critic))
            kl = sum(sample["logprobs"][t] for t in places) - logp.sum().item()
            value = (states[0] @ critic["score.weight"][0]).item()
            following = reward - KL * kl + GAMMA * after - value + GAMMA * LAM * following
            after = value
            advantages.insert(0, following)
        result.append(advantages)
    return result


@pytest.mark.parametrize("name", KEYS)
def test_two_updates_have_the_papers_loss_and_gradient(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weights, gradients = list[Weights](), list[Weights]()
    clipped = Learner._clipped

    def recorded(learner: Learner) -> Tensor:
        norm = clipped(learner)
        weights.append({n: p.detach().double() for n, p in learner.model.named_parameters()})
        gradients.append({n: t.grad.double() for n, t in learner.masters.tensors.items() if t.grad is not None})
        return norm

    monkeypatch.setattr(Learner, "_clipped", recorded)
    (tmp_path / "world.py").write_text(WORLD)
    words = (f"env={tmp_path}/world.py:World", "env.cut_turn=continue", "env.max_turns=3")
    words += (
        "algorithm.passes=2",
        "steps=1",
        "rollout.prompts=2",
        "rollout.max_tokens=5",
        "optimizer.max_grad_norm=0",
        *KEYS[name],
    )
    run(tiny, tmp_path, *words)
    episodes, reference, turn_gae = log(tmp_path, "rollouts"), Reference(tiny), name == "turn_gae"
    policy = range(1, 4, 2) if turn_gae else range(2)  # a critic's updates come before the policy's
    assert len(weights) == policy[-1] + 1 and {len(turns_of(e["samples"][0])) for e in episodes} == {1, 2, 3}
    with torch.no_grad():
        made = by_turn(episodes, reference, weights[1], weights[0]) if turn_gae else by_group(episodes)
    total, count = 0.0, sum(sum(e["samples"][0]["mask"]) for e in episodes)
    for update in policy:
        now = {n: w.clone().requires_grad_() for n, w in weights[update].items()}
        loss = torch.zeros((), dtype=torch.float64)
        for e, advantages in zip(episodes, made, strict=True):
            (sample,), spans = e["samples"], turns_of(e["samples"][0])
            places = [t for own in spans for t in own]
            each = torch.tensor([a for a, own in zip(advantages, spans, strict=True) for _ in own], dtype=torch.float64)
            ratio = (reference(now, sample["tokens"], places)[0] - torch.tensor(sample["logprobs"])[places]).exp()
            clip = -torch.minimum(ratio * each, ratio.clamp(0.8, 1.2) * each).sum()  # arXiv:1707.06347 eq. 7
            loss = loss + clip / (count if turn_gae else len(episodes) * len(places))
            seen = [t for t in range(places[0], places[-1]) if t not in places]  # ECHO, arXiv:2605.24517 section 3.1
            if seen and not turn_gae:
                loss = loss - 0.3 * reference(now, sample["tokens"], seen)[0].mean() / len(episodes)
        loss.backward()
        total += loss.item()
        for n, gradient in gradients[update].items():
            torch.testing.assert_close(gradient, now[n].grad, atol=1e-3, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")
    assert log(tmp_path)[0]["loss"] == pytest.approx(total, abs=1e-5)
