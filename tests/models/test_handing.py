"""Layers that call their attention, or what keeps their state, without what the model was called with."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.models.shape import Shape
from birl.models.slots import computed_by, slots_of
from birl.models.verify import verify
from birl.parallel.ranks import Grid, Ranks
from birl.parallel.tensor import check
from tests.models.sweep import Bench, own_logprobs, rows
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, same, trained
from tests.zoo import build

KINDS = ("gptj", "gpt_neo", "codegen", "falcon", "nemotron", "stablelm", "zaya", "xlstm")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_computed_again_with_their_layout(kind: str) -> None:
    """With gradient checkpointing, also of a copy that was made behind a forward pass; packed rows are those of
    transformers' own forward of each."""
    gradients, passes = list[dict[str, Tensor]](), list[int]()
    model = build(kind)
    slots_of(model)
    for again in (False, True):
        bench = Bench(deepcopy(model))
        bench.learner = Learner(bench.model, dtype=torch.float32, max_grad_norm=0, gradient_checkpointing=again)
        calls = list[int]()
        names = ("k_proj", "qkv_proj", "query_key_value", "mlstm_layer.k")
        inner = next(m for n, m in bench.model.named_modules() if n.endswith(names))
        inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        gradients.append(bench.gradient([rows(groups=1, episodes=2)]))
        passes.append(len(calls))
    assert passes[1] == 2 * passes[0]
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def trained_on(ranks: Ranks, kind: str) -> Outcome:
    options = {"initializer_range": 0.05}
    return trained(ranks, {"model": build(kind, **options), "eps": 1e-5, "gradient_checkpointing": True})


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        *((kind, Grid(fsdp=2)) for kind in ("gptj", "falcon", "zaya", "xlstm")),
        *(("nemotron", grid) for grid in (Grid(tp=2), Grid(cp=2))),
        ("stablelm", Grid(cp=2)),
    ],
    ids=str,
)
def test_split_layers_change_no_number(kind: str, grid: Grid) -> None:
    one = trained_on(Ranks(), kind)
    for outcome in on_ranks(grid, trained_on, kind):
        same(outcome, one, 1e-5)


def test_heads_that_are_counted_on_are_not_split() -> None:
    with pytest.raises(BirlError, match="the attention of StableLmForCausalLM counts on all of its heads"):
        check(build("stablelm"), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_measure_is_transformers_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not let attention be replaced, birl does; what birl is compared with must be the other one."""
    model = build(kind)
    slots_of(model)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("birl's attention")

    monkeypatch.setattr("birl.models.attention.attention", fail)
    with computed_by(model, "eager"):
        model(input_ids=torch.arange(9)[None], use_cache=False)


@pytest.mark.parametrize(
    "options",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
        {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4},
    ],
)
def test_every_shape_of_falcon(options: dict[str, int]) -> None:
    verify(build("falcon", **options))


@pytest.mark.parametrize("kind", [*KINDS, "gemma3n_text"])
def test_the_cost_of_their_tokens_is_known(kind: str) -> None:
    """Which packing asks for: Gemma 3n has a size of its MLP for each layer, xLSTM no heads of attention."""
    assert Shape.of_model(build(kind)).pair_cost >= 0


def test_falcon_with_alibi_is_refused() -> None:
    with pytest.raises(BirlError, match="FalconAttention wants attention that birl has no rule for: alibi"):
        verify(build("falcon", alibi=True))


def test_rows_longer_than_a_piece_have_a_gradient() -> None:
    """transformers computes xLSTM's long rows in pieces, without one, and rounds what it keeps between them."""
    model, samples = build("xlstm"), rows(groups=2, episodes=1)
    expected, model.config.max_inference_chunksize = own_logprobs(model, samples), 16
    bench = Bench(model)
    torch.testing.assert_close(bench.logprobs(samples), expected, atol=1e-5, rtol=1e-5)
    gradient = bench.gradient([samples])
    assert all(gradient[name].any() for name in gradient if "mlstm_layer.q" in name)
    assert model.config.max_inference_chunksize == 16
