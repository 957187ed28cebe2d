"""Muon: beside torch's own, on several ranks, and which matrices it takes."""

from typing import Any

import pytest
import torch
from torch.optim import _muon

from birl.learner.muon import Muon, hidden, orthogonal
from birl.parallel.ranks import Grid, Ranks
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import trained
from tests.tiny import tiny_model, tiny_moe
from tests.zoo import build


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (3, 16, 24)])
def test_a_step_has_singular_values_of_about_one(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonal(given)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    share = (result * (left @ right)).sum((-2, -1)) / min(shape[-2:])  # how much of it points where U V^T does
    assert (share > 0.75).all()
    if len(shape) == 3:
        torch.testing.assert_close(result, torch.stack([orthogonal(one) for one in given]))


@pytest.mark.parametrize("exact", [True, False])
def test_steps_are_torchs(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its bfloat16 iterations."""
    if exact:
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda update, *_: orthogonal(update))
    torch.manual_seed(0)
    start, vector = torch.randn(16, 24), torch.randn(7)
    ours, theirs, bias, plain = (torch.nn.Parameter(x.clone()) for x in (start, start, vector, vector))
    groups = [{"params": [ours], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    muon = Muon(groups, {ours: lambda part: part}, lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    torchs = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, fused=True)
    for _ in range(5):
        ours.grad = torch.randn(16, 24)
        theirs.grad = ours.grad.clone()
        bias.grad = torch.randn(7)
        plain.grad = bias.grad.clone()
        for optimizer in (muon, torchs, adamw):
            optimizer.step()
    way = (ours - start).norm()
    assert (ours - theirs).norm() < (1e-5 if exact else 0.03) * way
    assert torch.equal(bias, plain)


def test_hidden_matrices_are_neither_embeddings_nor_heads_nor_kernels() -> None:
    """Biases of experts, Mamba's A_log and wide kernels have two or three dimensions and are none."""
    others = [build(kind) for kind in ("lfm2", "qwen3_5_text", "gpt_oss", "falcon_mamba", "zaya", "recurrent_gemma")]
    for model in (tiny_model(), tiny_moe(), *others):
        names = hidden(model)
        assert any("_proj" in n for n in names)
        for name, p in model.named_parameters():
            other = "embed" in name or "lm_head" in name or "conv" in name.split(".")[-2] or p.ndim < 2
            other |= name.endswith(("bias", "A_log"))
            assert (name in names) == (not other), name


@pytest.mark.parametrize(
    ("grid", "moe"),
    [(Grid(fsdp=2), ""), (Grid(tp=2), ""), (Grid(fsdp=2, tp=2), ""), (Grid(fsdp=2), "qwen3"),
     (Grid(fsdp=2, ep=2), "qwen3")],
)  # fmt: skip
def test_ranks_step_as_one_does(grid: Grid, moe: str) -> None:
    def options() -> dict[str, Any]:
        model = {"moe": moe} if moe else {"model": tiny_model(kv_heads=2)}  # `trained` changes it
        return {"optimizer": "muon", "weight_decay": 0.1, **model}

    wanted = trained(Ranks(), options())
    for found in on_ranks(grid, trained, options()):
        torch.testing.assert_close(found.losses, wanted.losses, atol=1e-5, rtol=1e-5)
        for name, weight in wanted.weights.items():
            torch.testing.assert_close(found.weights[name], weight, atol=2e-5, rtol=1e-4, msg=name)
