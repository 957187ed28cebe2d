"""Training on answers that were drawn by top-p, top-k or min-p: the policy that is trained is the one that sampled."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.data.pack import pack
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.rollout.ledger import audit
from birl.samples import Support
from birl.train.build import sampling
from birl.train.build_worker import objective_of
from birl.train.objective import LossInputs, surrogate_of
from birl.types import Sample
from tests.tiny import tiny_model
from tests.train import test_observations as observations
from tests.train.test_policies import BOTH, metrics
from tests.train.test_policies import run as play
from tests.train.test_rl import log, run

CUT = ("rollout.top_p=0.8", "rollout.top_k=60", "rollout.min_p=0.02")
PROMPT = (5, 9, 4)


def worth(answer: tuple[int, ...]) -> float:
    return math.sin(sum(answer)) + 0.3 * len(answer)


def logits_of(model: torch.nn.Module, answer: tuple[int, ...]) -> torch.Tensor:
    """Of the token behind an answer, in double precision."""
    return model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0, -1].double()


def kept(logits: torch.Tensor, k: int, top_p: float) -> list[int]:
    """Top-k, then top-p, in plain floats."""
    numbers = logits.tolist()
    order = sorted(range(len(numbers)), key=lambda i: -numbers[i])[:k]
    total, mass, result = sum(math.exp(numbers[i]) for i in order), 0.0, list[int]()
    for word in order:
        if mass >= top_p * total:
            break
        result.append(word)
        mass += math.exp(numbers[word])
    return sorted(result)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "gspo", "reinforce"])
def test_the_gradient_is_that_of_the_truncated_policy(surrogate: str) -> None:
    """Every answer of two tokens that can be drawn, by its probability: the gradient of sum pi(y) r(y) under the policy
    that draws from the same words, which are those of the behaviour policy whatever the weights do."""
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.float32)
    with torch.no_grad():
        first = kept(logits_of(model, ()), 4, 0.9)
        second = {a: kept(logits_of(model, (a,)), 3, 0.8) for a in first}
    assert 1 < len(first) <= 4 and any(len(own) > 1 for own in second.values())
    answers = [(a, b) for a in first for b in second[a]]
    expected, logp = torch.zeros((), dtype=torch.float64), {}
    for a, b in answers:
        rows = (logits_of(model, ()), first, a), (logits_of(model, (a,)), second[a], b)
        logp[a, b] = [row[word] - row[words].logsumexp(0) for row, words, word in rows]
        expected = expected + (logp[a, b][0] + logp[a, b][1]).exp() * worth((a, b))
    parameters = dict(model.named_parameters())
    gradient = torch.autograd.grad(expected, list(parameters.values()))
    samples = [
        Sample(
            tokens=(*PROMPT, a, b), mask=(False,) * 3 + (True,) * 2,
            logprobs=(0.0,) * 3 + tuple(x.item() for x in logp[a, b]),
            versions=(-1,) * 3 + (0,) * 2, advantage=worth((a, b)), group=0, episode=i,
            support=Support.of([torch.tensor(first).numpy(), torch.tensor(second[a]).numpy()]),
        )
        for i, (a, b) in enumerate(answers)
    ]  # fmt: skip
    weights = [math.exp(sum(x.item() for x in logp[answer])) for answer in answers]
    assert sum(weights) == pytest.approx(1.0)
    keys = load(schema.RL, ["data.train=x", f"algorithm.surrogate={surrogate}"])
    behind: Any = SimpleNamespace(version=0)
    objective = objective_of(keys, behind, surrogate_of(keys.algorithm), reference=None, logp_and_entropy=None)
    stats = Stats()
    for batch in pack(samples, weights, 64):
        learner.forward_backward(batch, objective.loss(LossInputs(), 0.0, 0.0), stats)
    assert stats.sums["gap"] / stats.count < 1e-5
    tensors = learner.masters.tensors
    for name, wanted in zip(parameters, gradient, strict=True):
        found = -tensors[name].grad
        torch.testing.assert_close(found, wanted.float(), atol=2e-5, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "words",
    [
        "", "algorithm=ppo algorithm.kl_coef=0.05", "algorithm.kl_coef=0.1 algorithm.kl=k3 algorithm.kl_in=loss",
        "algorithm.updates_per_batch=2 algorithm.proximal=recompute algorithm.correction=mask", "lora.rank=4",
        "algorithm=ppo critic.shared=true", "model.dtype=bfloat16", "algorithm=clip_cov",
    ],
)  # fmt: skip
def test_engine_and_learner_agree_whatever_is_left_out(tiny: Path, tmp_path: Path, words: str) -> None:
    """As closely as from all words, at every step; at first nothing is apart from the reference."""
    run(tiny, tmp_path, "steps=3", "optimizer.lr=0.01", *CUT, *words.split())
    steps = log(tmp_path)
    assert all(s["mismatch/mean"] < 1e-5 for s in steps)
    if "updates_per_batch" not in words:
        assert all(abs(s["ratio/mean"] - 1) < 1e-4 for s in steps if "ratio/mean" in s)
    if "kl_coef" in words:
        name = "kl/episode" if "ppo" in words else "kl"
        assert abs(steps[0][name]) < 1e-5 < abs(steps[2][name])
    assert all(0 < s["entropy"] < math.log(60) for s in steps) and all(s["grad_norm"] > 0 for s in steps)


def test_micro_batches_change_nothing(tiny: Path, tmp_path: Path) -> None:
    for name, size in (("one", 4096), ("many", 120)):
        run(tiny, tmp_path / name, *CUT, "algorithm.kl_coef=0.1", f"learner.tokens_per_microbatch={size}", "steps=2")
    for one, many in zip(log(tmp_path / "one"), log(tmp_path / "many"), strict=True):
        for figure in ("loss", "grad_norm", "entropy", "kl"):
            assert one[figure] == pytest.approx(many[figure], rel=2e-4, abs=1e-6), figure


def test_a_run_that_goes_on_has_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    words = (*CUT, "optimizer.lr=0.01", "optimizer.schedule=constant", "optimizer.warmup_steps=0", "checkpoint.every=1")
    run(tiny, tmp_path / "parts", *words, "steps=2")
    run(tiny, tmp_path / "parts", *words, "steps=4")
    run(tiny, tmp_path / "whole", *words, "steps=4")
    assert log(tmp_path / "parts", "rollouts") == log(tmp_path / "whole", "rollouts")
    ends = [checkpoint.read_tensors(step_folders.latest(tmp_path / n / "run/checkpoints")) for n in ("parts", "whole")]
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_an_asynchronous_run_is_replayed_bit_for_bit(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Answers of older weights keep the words of the weights that drew them; drawn again, these are the same words."""
    words = (
        *CUT,
        "rollout.max_staleness=2",
        "rollout.max_tokens=20",
        "optimizer.lr=0.01",
        "steps=4",
        "engine.max_batch=6",
    )
    run(tiny, tmp_path / "first", *words, "track.record=true")
    assert not audit(tmp_path / "first/run").problems
    assert all(s["mismatch/mean"] is None or s["mismatch/mean"] < 1e-5 for s in log(tmp_path / "first"))
    more = (f"debug.replay={tmp_path}/first/run", "debug.resample=true", "track.console=plain")
    run(tiny, tmp_path / "again", *words, *more)
    assert "sampled again, bit-identical" in capsys.readouterr().out
    ends = [checkpoint.read_tensors(step_folders.latest(tmp_path / n / "run/checkpoints")) for n in ("first", "again")]
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_an_engine_in_another_process_says_the_same_words(tiny: Path, tmp_path: Path) -> None:
    words = (*CUT, "steps=2", "optimizer.lr=0.01", "model.dtype=bfloat16")
    run(tiny, tmp_path / "one", *words)
    run(tiny, tmp_path / "two", *words, "engine.kind=birl", "weights.timeout=30", "engine.request_timeout=30")
    assert log(tmp_path / "one", "rollouts") == log(tmp_path / "two", "rollouts")
    ends = [checkpoint.read_tensors(step_folders.latest(tmp_path / n / "run/checkpoints")) for n in ("one", "two")]
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


ENGINE = """
from birl.types import Completion, Stop

class Silent:
    def generate(self, prompt_ids, params, session):
        tokens = params.forced or (5,) * 3
        return Completion.of(tokens, (-0.1,) * len(tokens), (0,) * len(tokens), Stop.STOP)
    def load(self, update): pass
"""


def test_an_engine_that_does_not_say_the_words_is_found_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    words = (*CUT, "engine.kind=mine.py:Silent", "weights.max_gap=1e9", "learner.max_logprob_gap=1e9")
    with pytest.raises(BirlError, match="the tokens that each was sampled from"):
        run(tiny, tmp_path, *words)


def test_what_is_asked_of_engines() -> None:
    """Nothing where no words are left out; else their number is bounded."""
    plain = sampling(schema.Rollout())
    assert plain.plain and not plain.support and plain.top_k == 0
    for keys, top_k in (({"top_p": 0.9}, 1024), ({"min_p": 0.1}, 1024), ({"top_k": 7}, 7), ({"top_k": 2000}, 2000)):
        asked = sampling(schema.Rollout(**keys))  # pyright: ignore[reportArgumentType]
        assert asked.told and asked.top_k == top_k


def test_a_teacher_that_is_the_policy_has_nothing_to_teach(tiny: Path, tmp_path: Path) -> None:
    """Its log-probs are over the same words: sampled tokens have no advantage, and the divergence is 0."""
    words = (*CUT, "algorithm=distill", "steps=1", f"algorithm.teacher={tiny}")
    run(tiny, tmp_path / "sampled", *words)
    assert log(tmp_path / "sampled")[0]["grad_norm"] < 1e-4
    run(tiny, tmp_path / "whole", *words, "algorithm.teacher_divergence=reverse_kl")
    assert abs(log(tmp_path / "whole")[0]["divergence"]) < 1e-5


def test_a_policy_with_a_hint_teaches_over_the_same_words(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm=distill", "algorithm.teacher=self", "algorithm.teacher_rate=0", "algorithm.hint=['{answer}']")
    run(tiny, tmp_path, *CUT, *words, "steps=2")
    assert all(s["grad_norm"] > 0 and s["mismatch/mean"] < 1e-5 for s in log(tmp_path))


def test_several_policies_each_over_its_own_words(tiny: Path, tmp_path: Path) -> None:
    done = play(tiny, tmp_path, "Pair", "both", BOTH, *CUT)
    for row in metrics(done):
        for name in ("planner", "worker"):
            assert row[f"mismatch/{name}"] < 1e-5 and row[f"grad_norm/{name}"] > 0


def test_what_environments_answer_is_predicted_among_all_words(tiny: Path, tmp_path: Path) -> None:
    """Beside answers that leave no choice: their log-probs and entropies are 0."""
    words = ("algorithm=echo", "rollout.top_k=1", "rollout.temperature=1", "steps=1")
    one = observations.run(tiny, tmp_path / "one", *words)[0]
    many = observations.run(tiny, tmp_path / "many", *words, "learner.tokens_per_microbatch=400")[0]
    assert one["entropy"] == 0 and one["mismatch/mean"] == 0 and one["observations/loss"] > 1
    for figure in ("loss", "grad_norm", "observations/loss"):
        assert many[figure] == pytest.approx(one[figure], rel=2e-4), figure


@pytest.mark.parametrize("form", ["parallel.fsdp=2", "parallel.ddp=2"])
@pytest.mark.usefixtures("forking")
def test_ranks_change_no_number(tiny: Path, tmp_path: Path, form: str) -> None:
    """Each rank has an engine of its own, which is asked over HTTP."""
    for name, keys in (("one", ()), ("two", (form,))):
        run(tiny, tmp_path / name, *CUT, "algorithm.kl_coef=0.1", "steps=2", "validation.every=0", *keys)
    assert log(tmp_path / "one", "rollouts")[0]["text"] == log(tmp_path / "two", "rollouts")[0]["text"]
    one, two = log(tmp_path / "one")[0], log(tmp_path / "two")[0]
    for figure in ("reward/mean", "loss", "grad_norm", "entropy", "tokens/generated"):
        assert two[figure] == pytest.approx(one[figure], rel=2e-4, abs=1e-6), figure
    assert all(step["mismatch/mean"] < 1e-5 for step in log(tmp_path / "two"))
