"""Layers with a state of their own in packed rows: it starts anew with each sequence and is forked at each branch."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from birl.data.trees import Tree, ways
from birl.kernels.tensors import PAGE
from birl.learner.learner import Learner
from birl.models.attention import Packed, places
from birl.models.forward import hidden_states
from birl.models.shape import Shape
from birl.models.slots import COUNTED, computed_by, page_bytes, seen, slots_of, state_bytes
from birl.models.states import State, by_trees
from birl.models.verify import compare
from birl.parallel.shard import layers
from tests.models.sweep import Bench, rows
from tests.zoo import build

#: nodes of one token, also with branches, and longer than a chunk
TREES = [Tree.of(7, (5, (1, (4, (1, (1, 3)))), 70, 1)), Tree.of(1), Tree.of(2, (3,)), Tree.of(66)]


def separate(ids: Tensor) -> list[Tensor]:
    every = list(ways(TREES))
    above = {r.start for _, way in every for r in way[:-1]}
    return [ids[places(way)] for node, way in every if node.first not in above]


@pytest.mark.parametrize(
    "kind", ["lfm2", "qwen3_5_text", "bamba", "mamba2", "jamba", "mamba", "minimax", "recurrent_gemma", "zaya", "xlstm"]
)
def test_packed_trees_are_separate_sequences(kind: str) -> None:
    """In log-probs and in the gradient, against transformers' own forward."""
    model = build(kind, initializer_range=0.05)  # 0.2 makes 1e-4 of rounding, also between transformers' own ways
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (sum(map(len, TREES)),), generator=generator)
    weights = torch.randn(320, generator=generator)

    def of(hidden: Tensor) -> Tensor:
        return model.get_output_embeddings()(hidden).log_softmax(-1)

    positions = torch.tensor([p for tree in TREES for p in tree.positions()])
    rows = of(hidden_states(model, ids, positions, Packed(TREES)))
    first = separate(rows)
    with computed_by(model, "eager"):
        alone = [of(model.base_model(input_ids=s[None], use_cache=False)[0][0]) for s in separate(ids)]
        (torch.cat(alone) @ weights).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.testing.assert_close(torch.cat(first), torch.cat(alone), atol=1e-5, rtol=1e-5)
    (torch.cat(first) @ weights).sum().backward()
    largest = max(g.abs().max().item() for g in expected.values())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * largest, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["jamba", "mamba"])
def test_layers_that_hand_on_their_cache_alone_are_computed_again_with_their_layout(kind: str) -> None:
    """With gradient checkpointing transformers takes their cache away."""
    gradients, passes = list[dict[str, Tensor]](), list[int]()
    for again in (False, True):
        model = build(kind)
        bench = Bench(model)
        bench.learner = Learner(model, dtype=torch.float32, max_grad_norm=0, gradient_checkpointing=again)
        name = next(n for n, _ in model.named_modules() if n.endswith("in_proj"))
        calls = list[int]()
        model.get_submodule(name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        gradients.append(bench.gradient([rows(groups=1, episodes=2)]))
        passes.append(len(calls))
    assert passes[1] > passes[0]
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_nodes_of_one_depth_are_computed_at_once() -> None:
    """Those that others go on from, by their number of tokens; the last ones padded by a quarter at most."""
    shapes = list[tuple[int, ...]]()

    def step(rows: Tensor, state: State) -> Tensor:
        shapes.append(tuple(rows.shape))
        state.recurrent = rows.sum(1) + (0 if state.recurrent is None else state.recurrent)
        return rows

    group = Tree.of(9, (40, 30, 29, 5, 5))
    by_trees([group, group, Tree.of(5, ((3, (4, 4)), 4))], torch.ones(1, 2 * 118 + 20, 2), step)
    assert shapes == [(2, 9, 2), (1, 5, 2), (4, 40, 2), (2, 29, 2), (5, 5, 2), (1, 3, 2), (2, 4, 2)]


@pytest.mark.parametrize("shift", [-12, 12])
@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2", "bamba", "falcon_h1", "granitemoehybrid", "mamba2"])
def test_the_limits_of_time_steps_hold_for_one_token_too(kind: str, shift: float) -> None:
    """transformers' own decoding leaves them out."""
    model = build(kind, time_step_limit=(0.02, 0.9), ssm_multipliers=[1.0, 1.0, 1.0, 1.0, 0.5])  # the last: of steps
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data += shift
    compare(model, Tree.of(5, (4, 3)), Tree.of(5))


def test_the_size_of_a_state_is_known_without_weights() -> None:
    for kind in ("lfm2_moe", "qwen3_next"):
        model, empty = build(kind), build(kind).to("meta")
        assert slots_of(empty) == slots_of(model) and state_bytes(empty) == state_bytes(model)
        assert [s.layer for s in slots_of(model)] == [1] and [*seen(model).states] == [0, 2]


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_layers_are_not_within_one_another(kind: str) -> None:
    """transformers names Mamba's mixers beside the blocks that they are in: FSDP split both."""
    assert [type(m).__name__ for m in layers(build(kind))] == [f"{kind.capitalize()}Block"] * 3


def test_a_model_of_states_alone_counts_its_tokens_in_pages() -> None:
    model, empty = build("mamba2"), build("mamba2").to("meta")
    assert slots_of(empty) == slots_of(model) == (COUNTED,) and page_bytes(model) == 4 * PAGE
    assert state_bytes(empty) == state_bytes(model) and [*seen(model).states] == [0, 1, 2]
    shape = Shape.of_model(model)
    assert not shape.pair_cost and abs(shape.parameters / sum(p.numel() for p in model.parameters()) - 1) < 0.3


def test_kernels_for_gpus_are_advised_with_a_gpu_alone() -> None:
    slots_of(build("qwen3_5_text"))
    told = logging.getLogger("transformers.integrations.hub_kernels").isEnabledFor(logging.WARNING)
    assert told == torch.cuda.is_available()


KERNELS = """
import functools
from importlib import import_module

CALLED = {}

def __getattr__(name):  # as flash-linear-attention and causal-conv1d, computed by transformers' own functions
    own = {"chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
           "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule"}.get(name, name)
    if not name.endswith(("_rule", "_fn", "_update")):
        raise AttributeError(name)
    def kernel(*args, **kwargs):
        CALLED[name] = CALLED.get(name, 0) + 1
        module = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        return getattr(module, own).__wrapped__(*args, **kwargs)
    kernel.__signature__ = signature(name)
    return kernel

def signature(name):
    import inspect
    names = {"_rule": "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel",
             "_fn": "hidden_states weight bias activation", "pdate": "hidden_states conv_state weight bias activation"}
    every = next(v for k, v in names.items() if name.endswith(k)).split()
    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in every])
"""


def test_kernels_of_fla_and_causal_conv1d_are_used_where_they_are_installed(tmp_path: Path) -> None:
    for name in ("fla", "causal_conv1d"):
        (tmp_path / f"{name}.py").write_text(KERNELS)
    program = (
        "import fla, causal_conv1d; from tests.models.sweep import Bench, quarter, rows, trained; "
        "from tests.zoo import build; "
        "from birl.types import SamplingParams; b = Bench(quarter(build('qwen3_5_text'))); "
        "b.generate([SamplingParams(max_tokens=4)] * 2); assert not trained(b, rows(groups=2, episodes=2)); "
        "print(sorted({**fla.CALLED, **causal_conv1d.CALLED}))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=900)
    expected = [
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
    ]
    assert done.stdout.strip() == str(expected), done.stderr
