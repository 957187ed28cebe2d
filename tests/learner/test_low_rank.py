"""Adapters that share a base and a pass: gradients, bits, and the engine's log-probs."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from birl import kernels
from birl.engine.engine import EmbeddedEngine
from birl.learner.low_rank_run import ALPHA, AdamStep, LowRankConfig, LowRankRun, SharedBase, distinct, linear_layers
from birl.models import attention, vision
from birl.models.low_rank import HEAD
from birl.models.slots import computed_by
from birl.models.target_logprobs import TargetRow, pack_rows
from birl.text.pictures import placeholders
from birl.types import SamplingParams
from tests import sights
from tests.tiny import tiny_model, tiny_tokenizer
from tests.zoo import build

STEP = AdamStep(learning_rate=1e-2)


def base(dtype: torch.dtype = torch.float32, heads: int | str = 2) -> SharedBase:
    """`heads`: of a Llama, or a model type."""
    model = build(heads) if isinstance(heads, str) else tiny_model(heads=heads, kv_heads=heads // 2)
    model.set_attn_implementation(attention.NAME)
    return SharedBase(model.to(dtype), dtype)


def rows(seed: int, count: int = 3, width: int = 1) -> list[TargetRow]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 40, (count,), generator=random).tolist()
    return [
        TargetRow(
            torch.randint(3, 300, (n,), generator=random), torch.randint(3, 300, (n, width), generator=random)
        )
        for n in lengths
    ]  # fmt: skip


def group(seed: int) -> list[TargetRow]:
    """Rows with a beginning in common, and neighbours that have it not."""
    prompt, tails = rows(seed, 1)[0], rows(seed + 1, 5)
    stem = torch.arange(30, 60)
    begun = [torch.cat([stem, t.tokens]) for t in tails[:4]]
    targets = [torch.cat([stem + i // 2, t.tokens])[:, None] for i, t in enumerate(tails[:4])]
    return [prompt, *(TargetRow(t, y) for t, y in zip(begun, targets, strict=True)), tails[4]]


def linear(_: int, logp: list[Tensor]) -> Tensor:
    """Different for each place, so that a row that is confused with another is noticed."""
    return sum(((p * torch.linspace(-1, 1, p.numel()).view_as(p)).sum() for p in logp), torch.zeros(()))  # pyright: ignore


def moved(shared: SharedBase, seed: int, rank: int = 4, **parts: bool) -> LowRankRun:
    """A run whose B is not zero."""
    run = shared.run(LowRankConfig(rank=rank, seed=seed, **parts))
    with torch.no_grad():
        random = torch.Generator().manual_seed(seed)
        for name, master in run.masters.items():
            if name.endswith("lora_B"):
                master.copy_(0.05 * torch.randn(master.shape, generator=random))
    run.load(run.state(optimizer=False))
    return run


def reference(run: LowRankRun, data: list[TargetRow], heads: int | str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by autograd through a model whose weights are merged, one sequence at a time, without padding."""
    model, scale = base(heads=heads).model, ALPHA / run.config.rank
    leaves = {name: m.detach().clone().requires_grad_() for name, m in run.masters.items()}
    merged = {}
    for name in run.names:
        module = model.lm_head if name == HEAD else model.get_submodule(name)
        weight = module.weight.detach()  # pyright: ignore
        merged[f"{name}.weight"] = weight + scale * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
    if HEAD in run.names:  # embeddings are tied to it, and have no factors
        merged["model.embed_tokens.weight"] = model.model.embed_tokens.weight.detach()  # pyright: ignore
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # pyright: ignore
    result = []
    with computed_by(model, "eager"):
        for row in data:
            inputs = {"input_ids": row.tokens[None], "use_cache": False}
            out = torch.func.functional_call(model, merged, kwargs=inputs, tie_weights=False)
            result.append(out.logits[0].log_softmax(-1).gather(1, row.targets))  # pyright: ignore
    linear(0, result).backward()
    return [p.detach() for p in result], {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


def gradients(run: LowRankRun) -> dict[str, Tensor]:
    scale, result = ALPHA / run.config.rank, {}
    for name, f in run.weights.factors.items():
        assert f.gradients is not None
        result[f"{name}.lora_A"] = f.gradients[0][: run.config.rank]
        result[f"{name}.lora_B"] = f.gradients[1][:, : run.config.rank] * scale
    return result


@pytest.mark.parametrize("heads", [2, 4])  # birl's kernels; transformers' layers with hooks
@pytest.mark.parametrize("unembed", [True, False])
def test_log_probs_and_gradients_are_those_of_merged_weights(heads: int, unembed: bool) -> None:
    shared = base(heads=heads)
    run, data = moved(shared, 1, unembed=unembed), rows(2, width=3)
    run.collect()
    (logp,) = shared.learn([(run.weights, data)], linear)
    expected, grads = reference(run, data, heads)
    for mine, theirs in zip(logp, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)
    own = gradients(run)
    assert own.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.allclose(own[name], grad, atol=1e-4 * float(grad.abs().max()) + 1e-6), name


@pytest.mark.parametrize("kind", ["lfm2", "jamba"])
def test_layers_with_a_state_compute_each_row_with_its_adapter(kind: str) -> None:
    """Their rows are batched by sequences: other rows than those of the pass, in another order."""
    shared = base(heads=kind)
    runs, data = [moved(shared, seed, unembed=False) for seed in (1, 2)], [rows(2), group(4)]
    for run in runs:
        run.collect()
    result = shared.learn([(run.weights, own) for run, own in zip(runs, data, strict=True)], linear)
    for run, own, logp in zip(runs, data, result, strict=True):
        expected, grads = reference(run, own, kind)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logp, expected, strict=True))
        least = 1e-3 * max(float(grad.abs().max()) for grad in grads.values())
        for name, grad in grads.items():
            assert torch.allclose(gradients(run)[name], grad, atol=1e-3 * max(float(grad.abs().max()), least)), name


@pytest.mark.parametrize("heads", [2, 4])
def test_a_beginning_in_common_is_computed_once_and_changes_nothing(heads: int) -> None:
    shared, data = base(heads=heads), group(4)
    packed = pack_rows(data)
    assert len(packed.trees) == 3 and len(packed.tokens) == sum(len(r.tokens) for r in data) - 3 * 30
    run = moved(shared, 1)
    run.collect()
    (logp,) = shared.learn([(run.weights, data)], linear)
    expected, grads = reference(run, data, heads)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(logp, expected, strict=True))
    for name, grad in grads.items():
        assert torch.allclose(gradients(run)[name], grad, atol=1e-4 * float(grad.abs().max()) + 1e-6), name


def test_in_bfloat16_a_run_beside_others_has_the_bits_that_it_has_alone() -> None:
    if kernels.load(torch.bfloat16, 32) is None:
        pytest.skip("no C compiler")
    shared = base(torch.bfloat16)
    runs = [moved(shared, seed, rank) for seed, rank in ((1, 4), (2, 40), (3, 8))]
    data = [rows(10), group(11), rows(12)]

    def results(together: bool) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
        for run in runs:
            run.drop_gradients()
            run.collect()
        work = [(run.weights, own) for run, own in zip(runs, data, strict=True)]
        parts = [work] if together else [[one] for one in reversed(work)]
        logp = [one for part in parts for one in shared.learn(part, linear)]
        return list(zip(logp if together else logp[::-1], map(gradients, runs), strict=True))

    for (logp, grads), (others, own) in zip(results(True), results(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(logp, others, strict=True))
        assert all(torch.equal(grads[name], own[name]) for name in grads)
    ((each,), *_) = (shared.learn([(runs[1].weights, [row])], None) for row in data[1][1:2])
    assert torch.equal(each[0], results(True)[1][0][1])  # a beginning in common changes no bit, either


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.bfloat16, 2), (torch.float32, 2), (torch.float32, 4), (torch.float32, "lfm2")]
)
def test_the_engine_samples_for_several_adapters_with_the_learners_log_probs(
    dtype: torch.dtype, heads: int | str
) -> None:
    """Also for the same prompt, whose pages must not be shared by different adapters."""
    if kernels.load(dtype, 32) is None:
        pytest.skip("no C compiler")
    shared = base(dtype, heads)
    runs: list[LowRankRun | None] = [moved(shared, 1), None, moved(shared, 2, unembed=False), moved(shared, 3, 40)]
    prompt = tuple(range(5, 75))

    def of_prompt() -> list[Tensor]:
        row = TargetRow(torch.tensor(prompt[:-1]), torch.tensor(prompt[1:])[:, None])
        return [shared.learn([(run.weights if run else None, [row])], None)[0][0] for run in runs]

    before = of_prompt()

    async def sampled() -> list:
        with ThreadPoolExecutor(1) as compute:
            engine = EmbeddedEngine(
                shared.model, tiny_tokenizer(), end_ids=frozenset((2,)), context=512, compute=compute,
                version=lambda: 0, max_batch=8, kv_cache_gb=0.05, draft_rows=0,
            )  # fmt: skip
            asked = [
                engine.generate(prompt, SamplingParams(max_tokens=12, seed=i % 4, ignore_eos=True),
                                adapter=runs[i % 4].weights if runs[i % 4] else None)  # pyright: ignore
                for i in range(8)
            ]  # fmt: skip
            result = await asyncio.gather(*asked)
            await engine.close()
            return result

    completions = asyncio.run(sampled())
    assert len({tuple(c.tokens.tolist()) for c in completions}) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, of_prompt(), strict=True))  # the engine leaves no trace
    for i, completion in enumerate(completions):
        run, ids = runs[i % 4], torch.tensor((*prompt, *completion.tokens.tolist()))
        row = TargetRow(ids[:-1], ids[1:, None])
        ((logp,),) = shared.learn([(run.weights if run else None, [row])], None)
        learned, own = logp[len(prompt) - 1 :, 0], torch.from_numpy(completion.logprobs.copy())
        assert torch.equal(learned, own) if shared.alike else torch.allclose(learned, own, atol=1e-5)


def test_a_step_is_adamws_and_a_loaded_run_goes_on_as_the_one_that_was_saved() -> None:
    shared = base()
    run = moved(shared, 1)
    before = {n: m.detach().clone() for n, m in run.masters.items()}
    run.collect()
    shared.learn([(run.weights, rows(3))], linear)
    grads = {n: g.clone() for n, g in gradients(run).items()}
    norm = run.step(AdamStep(learning_rate=1e-2, clip=0.5, weight_decay=0.1))
    assert norm == pytest.approx(sum(float(g.square().sum()) for g in grads.values()) ** 0.5, rel=1e-4)
    for name, master in run.masters.items():
        g = grads[name] * min(1.0, 0.5 / norm)
        expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-12)
        assert torch.allclose(master, expected, atol=1e-4), name
    other = shared.run(LowRankConfig(rank=4, seed=9))
    other.load({n: t.clone() for n, t in run.state().items()}, run.steps)
    for each in (run, other):
        each.collect()
        shared.learn([(each.weights, rows(4))], linear)
        each.step(STEP)
    assert all(torch.equal(run.masters[n], other.masters[n]) for n in run.masters)


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    shared = base()
    run = moved(shared, 1)
    before = run.state()
    run.collect()
    shared.learn([(run.weights, rows(3))], lambda _, logp: logp[0].sum() * float("inf"))
    with pytest.raises(Exception, match="not finite"):
        run.step(STEP)
    assert all(torch.equal(before[n], t) for n, t in run.state().items())
    assert run.steps == 0


def test_rows_that_differ_are_those_of_unique() -> None:
    rows = torch.randint(0, 3, (200, 4), generator=torch.Generator().manual_seed(0))
    for given in (rows, rows[:, :2] * (2**31 - 1) // 2):
        result, where = distinct(given)
        expected = given.unique(dim=0, return_inverse=True)
        assert torch.equal(result, expected[0]) and torch.equal(where, expected[1])


def test_no_beginning_in_common_cuts_a_picture() -> None:
    picture, text = torch.tensor(placeholders("0123456789abcdef" * 4, 12)), torch.arange(3, 23)
    ends, goes_on = torch.cat([text, picture]), torch.cat([text, picture, text])
    packed = pack_rows([TargetRow(ids, ids[:, None]) for ids in (ends, goes_on)])
    assert [tree.sizes for tree in packed.trees] == [(20, 12, 32)]
    assert all(torch.equal(packed.tokens[p], ids) for p, ids in zip(packed.places, (ends, goes_on), strict=True))


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm", "gemma4", "gemma4_unified", "internvl"])
def test_what_is_computed_of_pictures_has_no_factors(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(sights.config(kind, sights.tokenizer(kind)))
    model.lm_head = torch.nn.Linear(48, 352, bias=False)
    model.to_empty(device="cpu")
    layers = linear_layers(model)
    assert layers and not {f"{name}.weight" for name in layers} & vision.tower(model).keys()
