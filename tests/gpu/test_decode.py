"""A step of decoding on a card that is not there: nothing waits, leaves the card, or is wider than it should be."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from birl.engine.runner import Runner
from birl.engine.sampler import draw
from birl.models import forward, paged_triton
from birl.models.fused_decoder import fused_for
from birl.models.paged import Cache
from birl.models.slots import slots_of
from tests.families import FAMILIES, family
from tests.gpu import test_decode
from tests.gpu.card import CUDA, Step, card

ROUTERS = {"glm4_moe": 2}  # whose products are meant to be float32


def decoded(
    step: Step,
    kind: str,
    change: Callable[[nn.Module], object] = lambda model: None,
    top_p: bool = False,
    **options: Any,
) -> None:
    """One step for eight sequences, as a graph captures it; with `top_p` as one for rows that are truncated."""
    model = family(kind, torch.bfloat16, "cuda", **options)
    change(model)
    runner = Runner(model)
    runner.cache = Cache.make(9, slots_of(model), torch.bfloat16, CUDA)
    tokens = torch.zeros(8, dtype=torch.int64, device=CUDA)
    lengths = torch.ones(8, dtype=torch.int32, device=CUDA)
    table = torch.zeros(8, 4, dtype=torch.int32, device=CUDA)
    uniforms, limits = torch.zeros(8, device=CUDA), torch.zeros(8, 3, device=CUDA)
    fused = fused_for(model)
    step.launches.clear()
    if fused:
        fused.join()
    with step:
        result, logprobs, _ = draw(
            runner.step_of_graph(tokens, lengths, table), uniforms, uniforms, limits if top_p else None
        )
    assert result.device == logprobs.device == CUDA and result.shape == (8,)


@pytest.mark.parametrize(("kind", "top_p"), [*((kind, False) for kind in FAMILIES), ("qwen3", True)])
def test_a_step_can_be_captured(kind: str, top_p: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(ROUTERS.get(kind, 0))
    with card(monkeypatch, step.launched):
        decoded(step, kind, top_p=top_p)
    layers, names = 3, ("write", "attend", "combine", "chunks", "bound", "ends", "sample")
    assert [step.launches[f"{name}_kernel"] for name in names] == [*[layers] * 3, 1, top_p, top_p, 1]


def waits(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def leaves(x: Tensor) -> Tensor:
    return x + torch.ones(x.shape[-1], device="cpu").to(x)


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "_local_scalar_dense": waits,
    "waits for the device": leaves,
    "float64": lambda x: (x.double() * 2).to(x.dtype),
    "multiplies in float32": lambda x: x + (x.float() @ torch.ones(64, 64, device=x.device)).to(x.dtype),
    "nonzero": lambda x: x + x.new_ones(len((x > 0).nonzero())).sum(),
    "add_norm_kernel has float32": lambda x: x.float(),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_a_graph_cannot_hold_is_seen(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        output = model.base_model.layers[1].self_attn.o_proj
        output.register_forward_hook(lambda module, inputs, output: BROKEN[problem](output))

    step = Step()
    with card(monkeypatch, step.launched), pytest.raises(Exception, match=problem):
        decoded(step, "qwen3", change)


def by_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Launches of one more layer."""
    counts = []
    for layers in (2, 3):
        shorter: dict[str, Any] = {
            name: value[:layers] for name, value in FAMILIES[kind].items() if isinstance(value, list)
        }
        step = Step(ROUTERS.get(kind, 0))
        with monkeypatch.context() as patch, card(patch, step.launched):
            decoded(step, kind, **shorter, num_hidden_layers=layers)
        counts.append(step.launches.total())
    return counts[1] - counts[0]


def test_the_table_of_launches_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")
    table = {kind: (int(a), int(b)) for kind, a, b in re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", text, re.M)}
    fused = {kind: by_layer(kind, monkeypatch) for kind in FAMILIES}
    for module in (forward, test_decode):
        monkeypatch.setattr(module, "fused_for", lambda model: None)
    assert table == {kind: (by_layer(kind, monkeypatch), fused[kind]) for kind in FAMILIES}


def test_kernels_leave_16_bit_types_to_pytorch_where_their_tiles_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with card(monkeypatch, lambda name, args: None):
        for capability, taken in (((7, 5), False), ((8, 0), True)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args, given=capability: given)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                query = torch.empty(1, 128, dtype=dtype, device=CUDA)
                assert paged_triton.usable(query, query) == (taken or dtype == torch.float32)
