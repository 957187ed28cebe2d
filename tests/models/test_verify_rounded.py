"""The check of a model before use, in the type of the run: rounding is allowed, and nothing else."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.config import schema
from birl.errors import BirlError
from birl.learner.policy import load_policy
from birl.models import twin
from birl.models.attention import Packed
from birl.models.paged import Paged
from birl.models.verify import Ways, verify
from tests.families import family

KINDS = ["llama", "qwen3", "gemma3_text", "mixtral"]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_passes_once_for_each_type(kind: str, proofs: Path) -> None:
    model = family(kind, torch.float32)
    verify(model)
    assert len(list(proofs.iterdir())) == 1
    verify(model, torch.bfloat16)
    assert len(list(proofs.iterdir())) == 2
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("layout", [Packed, Paged], ids=["packed", "paged"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_kernel_of_one_type_is_refused(
    kind: str, layout: Any, proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 all is right; bfloat16 has kernels of its own, which here leave out a part of every result."""
    attend = layout.attend

    def wrong(self: Any, layer: int, query: Tensor, *rest: Any) -> Tensor:
        result = attend(self, layer, query, *rest)
        if query.dtype == torch.bfloat16:
            result[..., result.shape[-1] // 2 :] = 0
        return result

    monkeypatch.setattr(layout, "attend", wrong)
    model = family(kind, torch.float32)
    verify(model)
    with pytest.raises(BirlError, match=r"in bfloat16 gives other log-probs .* model\.dtype=float32"):
        verify(model, torch.bfloat16)


@pytest.mark.parametrize(("error", "words", "right"), [(0.01, 1, True), (0.01, 320, False), (float("nan"), 1, False)])
def test_trained_weights_may_amplify_the_rounding_of_a_word(
    error: float, words: int, right: bool, proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuned SmolLM2 was refused: one log-prob of a million, of a rare word, was off by 0.00104 nats."""
    model, packed = family("llama", torch.float32), Ways.packed
    verify(model)  # the small one is proved

    def rounded(self: Ways) -> Tensor:
        result = packed(self)
        result[-1, :words] += error
        return result

    monkeypatch.setattr(Ways, "packed", rounded)
    with nullcontext() if right else pytest.raises(BirlError, match="other log-probs packed than alone"):
        verify(model)


def test_a_run_verifies_its_own_type(proofs: Path, tiny: Path, compute: Any) -> None:
    load_policy(schema.Model(path=str(tiny), dtype="bfloat16"), compute)
    assert len(list(proofs.iterdir())) == 1
    load_policy(schema.Model(path=str(tiny), dtype="float32"), compute)
    assert len(list(proofs.iterdir())) == 2
