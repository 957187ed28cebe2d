"""The balance of experts against its plain formula, and the routing of a rollout in training."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.learner import BALANCE, Learner, Stats
from birl.models import attention
from birl.models.routing import routers_of, routing_for
from birl.rollout.assemble import samples as assembled
from birl.types import Completion, Outcome, Sample, Stop, Trajectory, Turn
from tests.data.test_pack import groups
from tests.engine.test_engine import PROMPTS, Bench, seeded
from tests.tiny import tiny_model, tiny_moe, tiny_moe_folder


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe_folder(tmp_path_factory.mktemp("moe") / "model", kind)


def made(kind: str = "qwen3_moe", **options: Any) -> Learner:
    model = tiny_moe(kind)
    model.set_attn_implementation(attention.NAME)
    return Learner(model, dtype=torch.float32, max_grad_norm=0, **options)


def nothing(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return 0 * logp.sum(), {"entropy": entropy}


def plain_balance(learner: Learner, samples: list[Sample]) -> Tensor:
    """Switch Transformer's eq. 4 to 6, sequence by sequence, layer by layer; `transformers`' own forward."""
    model, total = learner.model, torch.zeros(())
    outputs = [model(torch.tensor([s.tokens]), output_router_logits=True, use_cache=False) for s in samples]  # pyright: ignore
    layers = [torch.cat(logits) for logits in zip(*(o.router_logits for o in outputs), strict=True)]
    for logits in layers:
        chosen = logits.topk(2).indices.flatten()
        shares = torch.stack([(chosen == i).float().mean() for i in range(4)])
        total = total + 4 * (shares * logits.softmax(-1).mean(0)).sum()
    return total / len(layers)


@pytest.mark.parametrize("max_tokens", [60, 80, 1000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_balance_of_a_step_is_its_formula_however_it_is_packed(
    kind: str, max_tokens: int, checkpointing: bool
) -> None:
    samples = groups(3)
    reference = made(kind)
    wanted = plain_balance(reference, samples)
    (0.5 * wanted).backward()
    learner, stats = made(kind, router_aux_coef=0.5, gradient_checkpointing=checkpointing), Stats()
    work = pack(samples, [1 / len(samples)] * len(samples), max_tokens)
    learner.learn([(batch, nothing) for batch in work], stats)
    assert stats.other[BALANCE] == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in reference.model.named_parameters():
        found = learner.model.get_parameter(name).grad
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_balancing_balances() -> None:
    learner, found = made(router_aux_coef=1.0), []
    work = [(batch, nothing) for batch in pack(groups(3), [0.0] * len(groups(3)), 1000)]
    for _ in range(30):
        stats = Stats()
        learner.learn(work, stats)
        learner.optim_step(1e-2)
        found.append(stats.other[BALANCE])
    assert found[0] > 1.02
    assert found[-1] < 1 + (found[0] - 1) / 2


def test_a_model_without_experts_has_nothing_to_balance() -> None:
    with pytest.raises(BirlError, match="LlamaForCausalLM has no routers"):
        Learner(tiny_model(), router_aux_coef=0.1)


def test_routes_forced_as_they_were_change_no_bit(kind: str) -> None:
    model = tiny_moe(kind)
    routing, ids = routing_for(model), torch.arange(5, 45)[None]
    with torch.no_grad(), routing.watching() as seen:
        plain = model(ids).logits
    with torch.no_grad(), routing.replaying(routing.routes(seen)):
        assert torch.equal(model(ids).logits, plain)
    assert torch.equal(routing.chosen(routing.routes(seen))[:, 1], seen[1][1])


def with_routes(bench: Bench, prompts: list[tuple[int, ...]], **options: Any) -> list[Sample]:
    completions = bench.generate(prompts, seeded(len(prompts), **options))
    turns = [Turn(prompt=p, completion=c) for p, c in zip(prompts, completions, strict=True)]
    episodes = [Trajectory(turns=(t,), reward=1.0, score=1.0, outcome=Outcome.OK) for t in turns]
    return [s for i, e in enumerate(episodes) for s in assembled(e, 1.0, i, 0)]


LONG = tuple(range(3, 103))
CASES = [
    ([*PROMPTS, LONG, LONG, LONG], {}),
    ([LONG, LONG, LONG], {"max_batch": 2}),  # the third finds the pages of another's prompt
    (PROMPTS, {"kv_cache_gb": 3 * 2 * 2 * 2 * 32 * 8 * 4 / 2**30}),  # three pages: some are preempted
]


@pytest.mark.parametrize(("prompts", "options"), CASES, ids=["together", "pages", "preempted"])
def test_the_engine_records_what_the_model_chooses(
    folder: Path, compute: ThreadPoolExecutor, prompts: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    bench = Bench(folder, compute, routes=True, **options)
    model, routing = bench.learner.model, routing_for(bench.learner.model)
    for sample in with_routes(bench, prompts):
        with torch.no_grad(), routing.watching() as seen:
            model(torch.tensor([sample.tokens]), use_cache=False)
        wanted = routing.chosen(routing.routes(seen))
        found = routing.chosen(torch.frombuffer(bytearray(sample.routes), dtype=torch.uint8).view(len(wanted), -1))
        assert torch.equal(found[:-1], wanted[:-1])
        assert (found[-1] == -1).all()


def forced_alone(learner: Learner, sample: Sample) -> Tensor:
    """Log-probs of the trained tokens where each router chooses what `sample` says: written out for one sequence."""
    routes = torch.tensor(list(sample.routes)).view(len(sample.tokens), 2, 2)
    handles = []
    for layer, router in enumerate(routers_of(learner.model)):

        def choose(module: Any, inputs: Any, output: Any, layer: int = layer) -> Any:
            chosen = torch.where(routes[:, layer] == 255, output[2], routes[:, layer])
            return output[0], output[0].gather(1, chosen).softmax(-1), chosen

        handles.append(router.register_forward_hook(choose))
    with torch.no_grad():
        logp = learner.model(torch.tensor([sample.tokens]), use_cache=False).logits[0].log_softmax(-1)
    for handle in handles:
        handle.remove()
    trained = torch.tensor(sample.mask).nonzero()[:, 0]
    return logp[trained - 1, torch.tensor(sample.tokens)[trained]]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_keeps_the_routing_of_the_rollout_when_the_router_has_moved(
    folder: Path, compute: ThreadPoolExecutor, checkpointing: bool
) -> None:
    bench = Bench(folder, compute, routes=True)
    learner = Learner(
        bench.learner.model, dtype=torch.float32, router_replay=True, gradient_checkpointing=checkpointing
    )
    samples = with_routes(bench, [*PROMPTS, LONG, LONG])
    batches = pack(samples, [1.0] * len(samples), 200)
    for batch in batches:
        torch.testing.assert_close(learner.forward(batch), batch.logprobs, atol=1e-5, rtol=0)
    for router in routers_of(learner.model):
        torch.manual_seed(3)
        router.weight.data += 0.1 * torch.randn_like(router.weight)
    wanted = [forced_alone(learner, s) for s in samples]
    for batch in batches:
        expected = torch.cat([wanted[i] for i in sorted(set(batch.sample.tolist()))])
        torch.testing.assert_close(learner.forward(batch), expected, atol=1e-5, rtol=1e-5)
        assert (bench.learner.forward(batch) - expected).abs().max() > 0.01  # without replay it chooses otherwise
    gradients = []
    for of in (learner, made_alike(learner)):
        of.learn([(b, lambda logp, e, b: (logp.sum(), {"entropy": e})) for b in batches], Stats())
        gradients.append(torch.cat([t.grad.flatten() for t in of.masters.tensors.values()]))  # pyright: ignore
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def made_alike(learner: Learner) -> Learner:
    """The same weights in another module, which does not compute layers again."""
    model = tiny_moe(learner.model.config.model_type)  # pyright: ignore
    model.load_state_dict(learner.model.state_dict())
    model.set_attn_implementation(attention.NAME)
    return Learner(model, dtype=torch.float32, router_replay=True)


def test_turns_of_one_conversation_keep_the_route_of_when_a_token_was_first_computed() -> None:
    def turn(prompt: tuple[int, ...], tokens: tuple[int, ...], routes: bytes) -> Turn:
        n = len(tokens)
        said = Completion(tokens=tokens, logprobs=(0.0,) * n, versions=(0,) * n, stop=Stop.STOP, routes=routes)
        return Turn(prompt=prompt, completion=said)

    turns = (turn((5, 6), (7, 8), b"aabbcc"), turn((5, 6, 7, 8, 9), (10,), b"xxxxxxddee"))
    (sample,) = assembled(Trajectory(turns=turns, reward=1.0, score=1.0, outcome=Outcome.OK), 1.0, 0, 0)
    assert sample.routes == b"aabbccddee\xff\xff"


def test_routes_of_another_model_are_refused() -> None:
    learner = made(router_replay=True)
    sample = Sample(
        tokens=(5, 6), mask=(False, True), logprobs=(0.0, 0.0), versions=(-1, 0), advantage=1.0, group=0, episode=0,
        routes=b"123456",
    )  # fmt: skip
    with pytest.raises(BirlError, match="Routes of 3 bytes a token, where this model's have 4"):
        learner.forward(pack([sample], [1.0], 80)[0])


def test_more_than_255_experts_have_two_bytes() -> None:
    routing = routing_for(tiny_moe(experts=300))
    seen = {
        layer: (F.one_hot(torch.tensor([299, 7]), 300).float(), torch.tensor([[299, 255], [7, 0]])) for layer in (0, 1)
    }
    routes = routing.routes(seen)
    assert routes.shape == (2, 8)
    assert torch.equal(routing.chosen(routes)[:, 0], seen[0][1])
    assert (routing.chosen(torch.full_like(routes, 255)) == -1).all()
