"""Logits on a card that is not there: which types the products have in engine and learner, and what the kernels get."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from birl.engine.runner import Runner
from birl.models import logprobs
from birl.models.forward import logits
from birl.types import SamplingParams
from tests.gpu.card import CUDA, card

WORDS, HIDDEN = 64, 16


class Products(TorchDispatchMode):
    """Notes the types of every product, those read and the one written."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in ("mm", "addmm", "bmm"):
            read = [a.dtype for a in args if isinstance(a, Tensor)]
            self.types.append((*read, result.dtype))
        return result


WIDE, NARROW = (torch.bfloat16, torch.bfloat16, torch.float32), (torch.bfloat16,) * 3


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[torch.dtype]]]:
    """Within, tensors on the card have no contents, and kernels note the types of the first two that they are given."""
    result: dict[str, list[torch.dtype]] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        result[name] = [a.dtype for a in args[:2]]

    with card(monkeypatch, note):
        yield result


def a_model() -> Any:
    """As far as logits go."""
    head = torch.nn.Linear(HIDDEN, WORDS, bias=False, device=CUDA, dtype=torch.bfloat16)
    model: Any = torch.nn.Module()
    model.head, model.get_output_embeddings = head, lambda: head
    text = SimpleNamespace(head_dim=16, model_type="llama")
    model.config = SimpleNamespace(get_text_config=lambda: text)
    return model


def test_the_engine_samples_from_float32(launched: dict[str, list[torch.dtype]]) -> None:
    model, products = a_model(), Products()
    hidden = torch.empty(3, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    with products:
        assert logits(model, hidden).dtype == torch.float32
        tokens, logps, _ = Runner(model).sample(hidden, [SamplingParams(max_tokens=1)] * 3, [0.5] * 3)
    assert products.types == [WIDE, WIDE] and launched["chunks_kernel"][0] == torch.float32
    assert (tokens.dtype, logps.dtype, logps.device) == (torch.int64, torch.float32, CUDA)


def test_the_learner_learns_from_float32_and_gives_gradients_in_its_weights_type(
    launched: dict[str, list[torch.dtype]],
) -> None:
    """The gradient by the logits is rounded once, for the two products that read it."""
    hidden = torch.empty(5, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    weight = torch.empty(WORDS, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    targets, up, kept = torch.zeros(5, dtype=torch.int64, device=CUDA), torch.ones(5, device=CUDA), []
    context: Any = SimpleNamespace(
        save_for_backward=lambda *tensors: kept.extend(tensors), set_materialize_grads=lambda on: None,
        needs_input_grad=[True, True, False],
    )  # fmt: skip
    function, products = logprobs._TokenLogprobs, Products()
    with products:
        logp, entropy = function.forward(context, hidden, weight, None, targets, 0.7, 10**6, None, logprobs.Behind())
        context.saved_tensors = tuple(kept)
        by_hidden, by_weight, *_ = function.backward(context, up, up)
    assert products.types == [WIDE, WIDE, WIDE, NARROW]  # logits, logits again, by hidden states, by the weight
    assert launched == {
        "logprob_kernel": [torch.float32, torch.int64],
        "logprob_backward_kernel": [torch.float32, torch.bfloat16],
    }
    assert logp.dtype == entropy.dtype == torch.float32 and by_hidden is not None and by_weight is not None
    assert by_hidden.dtype == by_weight.dtype == torch.bfloat16
