"""Rotary positions whose angles transformers takes from the longest sequence of a batch: a token has one log-prob, that
of transformers' own forward of its sequence alone, whatever else was computed before and beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from birl.models import twin
from birl.models.load import context_limit, load_model
from birl.models.slices import fill, sketched
from birl.models.verify import prove, verify
from tests.models import sweep
from tests.zoo import build

LONGROPE = sweep.LONGROPE | {"rope_theta": 10000.0}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {  # kind, options, context
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 512),
    "longrope": ("phi3", LONGROPE, 128),
    "longrope of experts": ("phimoe", LONGROPE, 128),
}


@pytest.mark.parametrize("name", MODELS)
def test_sequences_within_the_context_have_the_angles_of_short_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path / "proofs")
    kind, rope, context = MODELS[name]
    folder = tmp_path / "model"
    build(kind, rope_parameters=rope, original_max_position_embeddings=128).save_pretrained(folder)
    model: Any = load_model(folder)
    assert context_limit(model) == context
    verify(model)
    parts: Any = sketched(folder, torch.device("cpu"))
    prove(parts.config, torch.device("cpu"))
    fill(parts)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids, more = torch.arange(3, 103)[None], torch.arange(600)[None] % 300  # more: beyond every limit
    with torch.no_grad():
        expected = theirs(ids).logits
        for own in (model, parts):
            own(more)
            torch.testing.assert_close(own(ids).logits, expected, atol=1e-4, rtol=1e-4)
    bench = sweep.Bench(model)
    assert not sweep.sampled(bench) and not sweep.trained(bench, sweep.rows(groups=2, episodes=2))
