"""A sleeping engine has no memory that another process could use, or says so."""

import asyncio
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.allocator import keep_memory
from birl.engine import engine as engine_module
from birl.engine.engine import EmbeddedEngine
from birl.engine.weights import Weights
from birl.errors import BirlError
from birl.models import attention, fused_decoder
from birl.models.decoder import decoder_for
from birl.models.fused_decoder import FusedDecoder
from birl.models.load import cast, load_model, load_tokenizer
from birl.parallel.ranks import Grid, Ranks
from birl.types import SamplingParams
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model, tiny_tokenizer


def engine(folder: Path, compute: ThreadPoolExecutor) -> EmbeddedEngine:
    model, tokenizer = load_model(folder).requires_grad_(False), load_tokenizer(folder)
    return EmbeddedEngine(
        model, tokenizer, end_ids=frozenset({2}), context=512, compute=compute, kv_cache_gb=0.01, draft_rows=0
    )


async def test_an_engine_that_slept_keeps_no_joined_or_laid_out_copy(tiny: Path, compute: ThreadPoolExecutor) -> None:
    own = engine(tiny, compute)
    await own.generate((1, 9, 4), SamplingParams(max_tokens=3))
    joined = FusedDecoder(own.runner.model)
    joined.join()
    weights = [layer.qkv.tensors()[0][0].untyped_storage() for layer in joined.layers]
    copies: list[Any] = [weakref.ref(x) for x in weights]
    del weights
    fused_decoder.MADE[own.runner.model] = joined
    if decoder := decoder_for(own.runner.model):
        copies.append(weakref.ref(decoder))
    del joined, decoder
    await own.sleep()
    assert [copy() for copy in copies] == [None] * len(copies)
    await own.close()


async def test_a_gpu_that_does_not_get_its_memory_back_is_told_of(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 3 GiB are dropped, and 1 GiB comes back."""
    for returned in (1, 3):
        own = engine(tiny, compute)
        monkeypatch.setattr(Weights, "nbytes", 3 * 2**30)
        held = iter([8 * 2**30, (8 - returned) * 2**30])
        monkeypatch.setattr(engine_module, "held_memory", lambda device, held=held: next(held))
        if returned == 3:
            await own.sleep()
        else:
            with pytest.raises(BirlError, match=r"gave back 1\.00 GiB of cpu.* 3\.0\d GiB: 2\.0\d GiB are missing"):
                await own.sleep()
        assert own.asleep
        await own.close()


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def gives_back(_: Ranks) -> tuple[int, int]:
    """Bytes of the weights, and by how much the process shrinks when they sleep."""
    keep_memory()

    async def main() -> tuple[int, int]:
        model = tiny_model(layers=6, hidden=1024, heads=32, kv_heads=32)
        model.set_attn_implementation(attention.NAME)  # type: ignore[attr-defined]
        model = cast(model.eval(), torch.float32).requires_grad_(False)
        with ThreadPoolExecutor(1) as compute:
            limits: Any = {"end_ids": frozenset(), "context": 64, "compute": compute, "kv_cache_gb": 0.1}
            own = EmbeddedEngine(model, tiny_tokenizer(), **limits)
            await own.generate((1, 2, 3), SamplingParams(max_tokens=4))
            before, size = resident(), own.weights.nbytes
            await own.sleep()
            after = resident()
            await own.close()
            return size, before - after

    return asyncio.run(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_system_has_a_sleeping_engines_memory() -> None:
    """Not only free for this process: `birl serve` sleeps so that another can train."""
    ((size, returned),) = on_ranks(Grid(), gives_back)
    assert returned > 0.9 * size > 100e6
