"""Digests of weights: the same for the same bytes, wherever they are. The kernel's in Triton's interpreter (pip install
triton; TRITON_INTERPRET=1 python -m pytest tests/models/test_digests.py) or on a GPU."""

import os

import pytest
import torch
from torch import Tensor

from birl.models import digests as module
from birl.models import fused
from birl.models.digests import PIECE, digest, digests, nonfinite

CUDA = torch.cuda.is_available()
runs = fused.has_triton() and (CUDA or bool(os.environ.get("TRITON_INTERPRET")))


def weights(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("count", [0, 1, PIECE // 2 - 1, PIECE // 2, 3 * PIECE // 2 + 7])
def test_each_byte_type_and_shape_counts(count: int) -> None:
    plain = weights(count)
    every = [digest(plain), digest(plain[None]), digest(plain.view(torch.float16))]
    for place in {0, count // 2, count - 1} if count else ():
        changed = plain.clone()
        changed.view(torch.uint16)[place] ^= 1
        every.append(digest(changed))
    if count > PIECE:
        every.append(digest(torch.cat([plain[PIECE // 2 : PIECE], plain[: PIECE // 2], plain[PIECE:]])))
    assert len(set(every)) == len(every)
    assert digest(plain.clone()) == every[0] and digests({"a": plain, "b": plain}) == dict.fromkeys("ab", every[0])


@pytest.mark.skipif(not runs, reason="no Triton with a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("count", [0, 5, PIECE // 2, 2 * PIECE // 2 + 7])
def test_a_cards_digest_is_the_hosts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every = weights(count + 3)
    tensors = {"whole": every, "not at a word": every[1:], "numbers": torch.arange(count), "scalar": torch.tensor(3.0)}
    expected = digests(tensors)
    monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    device = "cuda" if CUDA else "cpu"
    assert digests({name: t.to(device) for name, t in tensors.items()}) == expected


def test_numbers_that_are_none_are_named() -> None:
    bad = weights(9)
    bad[3] = float("nan")
    assert nonfinite({"a": weights(9), "b": bad, "c": torch.arange(3), "d": -torch.tensor([float("inf")])}) == [
        "b",
        "d",
    ]
    assert nonfinite({}) == []
