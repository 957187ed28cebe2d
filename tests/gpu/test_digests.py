"""Digests of weights on a card that is not there: what comes to the host of them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from birl.models import digests
from tests.gpu.card import CUDA, Step, card


def test_a_thousandth_of_the_weights_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor 8 bytes for every piece, and what is behind the last one; all of them in one copy."""
    copies: list[int] = []

    def brought(parts: list[Tensor]) -> list[memoryview]:
        copies.append(sum(map(len, parts)))
        return [np.zeros(len(part), np.uint8).data for part in parts]

    monkeypatch.setattr(digests, "_brought", brought)
    launched: list[str] = []
    with card(monkeypatch, lambda name, args: launched.append(name)):
        monkeypatch.setattr(digests, "keys", lambda device: torch.zeros(281, dtype=torch.int64, device=device))
        shapes = {"embedding": (151_936, 1024), "up": (3072, 1024), "norm": (1024,)}
        tensors = {n: torch.empty(s, dtype=torch.bfloat16, device=CUDA) for n, s in shapes.items()}
        with Step():  # an operation that leaves the card fails
            result = digests.digests(tensors)
        size = sum(t.nbytes for t in tensors.values())
    assert result.keys() == shapes.keys() and launched == ["digest_kernel"] * 2
    assert len(copies) == 1 and copies[0] < size / 1000, (copies, size)
