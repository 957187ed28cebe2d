"""No tensor has logits of all tokens, forward or backward, and what there is at once is what `birl plan` counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.data.pack import pack
from birl.data.support import SupportRows
from birl.learner.learner import Learner, Stats
from birl.models import logprobs, shape
from birl.models.decoder import decoder_for
from birl.models.load import cast
from birl.models.logprobs import token_logprobs
from birl.models.shape import backward_bytes
from birl.types import Sample
from tests.gpu.card import CUDA, card
from tests.held import Held
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [0, 50, 1024])
@pytest.mark.parametrize(("tokens", "words"), [(16_384, 152_064), (65_536, 32_064), (16_384, 19_008), (100, 1000)])
def test_on_a_card(tokens: int, words: int, each: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without contents; 19,008 words are a rank's of eight. The head's gradient goes into its master. `each`:
    words that a token was drawn from."""
    hidden, kept = 3584, []
    context: Any = SimpleNamespace(
        save_for_backward=lambda *tensors: kept.extend(tensors), set_materialize_grads=lambda on: None,
        needs_input_grad=[True, True, False],
    )  # fmt: skip
    with card(monkeypatch, lambda name, args: None):
        states = torch.empty(tokens, hidden, device=CUDA, dtype=dtype)
        weight: Any = torch.empty(words, hidden, device=CUDA, dtype=dtype)
        if dtype != torch.float32:
            weight.master = weight.float()
        targets, up = torch.zeros(tokens, dtype=torch.int64, device=CUDA), torch.ones(tokens, device=CUDA)
        counts, ids = (torch.zeros(n, dtype=torch.int64, device=CUDA) for n in (tokens, each * tokens))
        support = SupportRows(counts, ids, range(0, each * tokens + 1, each)) if each else None
        given = states, weight, targets, up, counts, ids
        with Held(*given) as forward:
            function, behind = logprobs._TokenLogprobs, logprobs.Behind(None, support)
            function.forward(context, states, weight, None, targets, 1.0, shape.GPU_CHUNK, None, behind)
        context.saved_tensors = tuple(kept)
        with Held(*given, *filter(torch.is_tensor, kept)) as backward:
            function.backward(context, up, up)
    gradient = 4 * words * hidden
    planned = backward_bytes(tokens, hidden, words, dtype.itemsize, gpu=True, kept=each * tokens)
    assert backward.peak - gradient == pytest.approx(planned, rel=0.05) and forward.peak < planned
    rows = 4 * tokens * hidden
    assert forward.largest <= 4 * shape.GPU_CHUNK
    assert backward.largest <= max(gradient, rows, 4 * min(shape.GPU_CHUNK, tokens * words))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu(kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve times as many logits as there may be at once."""
    monkeypatch.setattr(shape, "CHUNK", 2**18)
    monkeypatch.setattr(shape, "WIDENED", 2**14)
    model = cast(tiny_model(vocab=4096), dtype)
    decoder, head = decoder_for(model) if kernels else None, model.lm_head
    if kernels and decoder is None:
        pytest.skip("no kernels here")
    head.weight.grad = None  # pyright: ignore
    if dtype != torch.float32:
        head.weight.master = head.weight.detach().float()  # pyright: ignore
    tokens, hidden = 768, head.weight.shape[1]  # pyright: ignore
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64)
    if decoder is not None:
        decoder.head.layout()  # once for all steps
    with Held(states, head.weight, targets) as forward:  # pyright: ignore
        logp, entropy = token_logprobs(states, head, targets, 1.0, decoder=decoder)
    up = torch.ones(tokens), torch.ones(tokens)
    with Held(states, head.weight, targets, logp, entropy, *up) as backward:  # pyright: ignore
        torch.autograd.backward([logp, entropy], up)
    planned = backward_bytes(tokens, hidden, 4096, dtype.itemsize, kernels=kernels)
    gradient = 4 * 4096 * hidden
    assert backward.peak - gradient == pytest.approx(planned, rel=0.05) and forward.peak < 1.05 * planned
    assert max(forward.largest, backward.largest) <= max(gradient, 4 * 2**18) < 4 * tokens * 4096


@pytest.mark.parametrize("plain", [False, True])
def test_a_training_step(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything that a micro-batch computes, loss and figures included."""
    monkeypatch.setattr(shape, "CHUNK", 2**14)
    if plain:
        monkeypatch.setattr("birl.learner.outputs.decoder_for", lambda model: None)
    learner = Learner(tiny_model(vocab=4096), dtype=torch.bfloat16)
    one = {"versions": (-1, *[0] * 100), "logprobs": (0.0,) * 101, "mask": (False, *[True] * 100), "episode": 0}
    samples = [Sample(tokens=tuple(range(n, n + 101)), advantage=1.0, group=n, **one) for n in range(5)]
    (batch,) = pack(samples, [1.0] * 5, 10_000)
    known: list[Tensor] = [*learner.model.parameters(), *learner.masters.tensors.values()]
    with Held(*known) as held:
        learner.forward_backward(batch, reinforce, Stats())
    assert held.largest <= 4 * learner.model.lm_head.weight.numel()  # pyright: ignore
    assert 4 * len(batch.targets) * 4096 > 2 * held.largest
