"""The predictions of docs/gpu.md are those of the operations of today, and their arithmetic is that of paper."""

import re

import pytest
import torch

from benchmarks import gpu_roofline as roofline
from benchmarks.gpu_bench import SHAPES
from benchmarks.gpu_predicted import decode_bytes
from birl.models.shape import Shape
from birl.plan.cluster import cluster_of
from tests.gpu.card import CUDA, card

H200 = 1  # column of the tables
FIX = "docs/gpu.md: run `python -m benchmarks.gpu --roofline`"


def test_the_predictions_of_a_model_are_in_the_docs() -> None:
    page = roofline.PAGE.read_text(encoding="utf-8").splitlines()
    for rows in roofline.tables(["qwen3-0.6b"]).values():
        assert {*rows} <= {*page}, FIX


def test_all_predictions_are_in_the_docs() -> None:
    assert roofline.text() in roofline.PAGE.read_text(encoding="utf-8"), FIX


def test_an_h200_is_predicted_to_be_used() -> None:
    """Qwen3-8B: decoding at 70 % of the floor of its memory at least, training at 45 % of its FLOPs."""
    decoding, training = (
        [int(share) for share in re.findall(r"(\d+)%", line)]
        for line in roofline.PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| qwen3-8b |")
    )
    assert decoding[H200] >= 70 and training[H200] >= 45


def test_the_floor_of_decoding() -> None:
    """By hand: Qwen3-8B has 7.57e9 weights without its embedding, and 147,456 bytes of keys and values a token."""
    dense = Shape.of({"model_type": "qwen3", **SHAPES["qwen3-8b"]})
    assert decode_bytes(dense, 64, 2048) == pytest.approx(2 * 7.57e9 + 64 * 2048 * 147_456, rel=0.001)
    sparse = Shape.of({"model_type": "qwen3_moe", **SHAPES["qwen3-30b-a3b"]})
    one, all_ = (decode_bytes(sparse, n, 0) for n in (1, 10**6))
    assert one == pytest.approx(2 * (sparse.active + sparse.embedding))
    assert all_ == 2 * (sparse.parameters - sparse.embedding)


def test_what_an_operation_costs() -> None:
    """A product by its FLOPs or its bytes, a look-up by the rows that it reads, and the cache by its context."""
    trace = roofline.Trace(context=96)
    with pytest.MonkeyPatch.context() as patch, card(patch, trace.launched), trace:
        x = torch.empty(64, 32, device=CUDA, dtype=torch.bfloat16)
        keys, values = torch.empty(2, 100, 2, 32, 16, device=CUDA, dtype=torch.bfloat16).unbind()
        ids = torch.zeros(4, dtype=torch.int64, device=CUDA)
        trace.on = True
        torch.nn.functional.embedding(ids, x)
        x.view(32, 64) @ x
        trace.launched("attend_kernel", (x, keys, values))
    assert trace.launches == {
        roofline.Launch("other", 2 * 4 * 32 * 2 + 4 * 8): 1,
        roofline.Launch("products", 2 * (2 * 64 * 32 + 32 * 32), 2.0 * 32 * 64 * 32): 1,
        roofline.Launch("attention", 64 * 96 * 2 * 2 * 16 * 2 + 64 * 32 * 2): 1,
    }
    h200, rates = cluster_of("h200", 1), roofline.RATES["h200"]
    assert roofline.Launch("other", 4.8e9).seconds(h200, rates) == pytest.approx(1e-3 / 0.85)
    assert roofline.Launch("products", 4.8e8, 989e9).seconds(h200, rates) == pytest.approx(1e-3 / 0.65)
    assert roofline.Launch("attention", 0, 989e9).seconds(h200, rates) == pytest.approx(1e-3 / 0.34)
