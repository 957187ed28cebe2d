"""The heads of a model: the layer that makes logits, and what an architecture does behind it, a factor (Cohere,
Granite, Falcon-H1) or a cap (Gemma 2, arXiv:2408.00118 section 2); and a score in the place of the next token.

A reward model's or critic's head is a submodule `score` of the causal language model, as transformers'
...ForSequenceClassification has one, so a reward model is saved in that standard form. The body, its kernels and its
packing are those of the language model; its own head is left alone, and frozen where it is not tied to the embedding.
"""

import inspect
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from birl.errors import BirlError
from birl.models.device import device_of

HEADS = ("score", "value")
FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # its power
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
KNOWN: "WeakKeyDictionary[nn.Module, AfterHead | None]" = WeakKeyDictionary()


def head(model: nn.Module) -> nn.Linear:
    """The layer that turns hidden states into logits."""
    return model.get_output_embeddings()  # pyright: ignore


@dataclass(frozen=True, slots=True)
class AfterHead:
    """logits = cap tanh(scale x / cap), or scale x without a cap; x is what the head gives."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, x: Tensor) -> Tensor:
        """In place, float32."""
        x = x.mul_(self.scale)
        return x if self.cap is None else x.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of each logit by x."""
        return self.scale if self.cap is None else (logits / self.cap).square_().neg_().add_(1.0).mul_(self.scale)


def after_head(model: nn.Module) -> AfterHead | None:
    """None where the head's output is the logits. From the config, where the model's own forward reads it there."""
    if model not in KNOWN:
        config = cast(Any, model).config.get_text_config()
        factors = FACTORS | ({"logits_scaling": 1} if config.model_type == "hyperclovax" else {})
        read = set(inspect.unwrap(type(model).forward).__code__.co_names)
        scale = 1.0
        for name, power in factors.items():
            scale *= (getattr(config, name, None) or 1.0) ** power if name in read else 1.0
        cap = next((getattr(config, name, None) or None for name in CAPS if name in read), None)
        KNOWN[model] = None if (scale, cap) == (1.0, None) else AfterHead(scale, cap)
    return KNOWN[model]


def add_score_head(model: nn.Module, seed: int, name: str = "score") -> None:
    """A linear map of the last hidden state to one number: `model.score`, [1, H] float32. With the name "value" it is a
    critic beside the language model's head, not in its place.

    Small random weights (standard deviation 1 / (H + 1), Stiennon et al. arXiv:2009.01325 appendix B.1), so that all
    scores begin near 0 and far closer together than what they will learn to tell apart. A model that has a head already
    keeps it.
    """
    if score_head(model, name) is not None:
        return
    width = head(model).weight.shape[1]
    score = nn.Linear(width, 1, bias=False, device=device_of(model), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    score.weight.data.copy_(torch.randn(1, width, generator=generator, dtype=torch.float32) / (width + 1))
    model.add_module(name, score)


def scores(hidden: Tensor, score: nn.Linear) -> Tensor:
    """[N, H] -> [N] float32; bfloat16 has three digits, too few to tell scores apart."""
    return hidden.float() @ score.weight[0].float()


def score_head(model: nn.Module, name: str = "score") -> nn.Linear | None:
    result = getattr(model, name, None)
    if result is not None and not (isinstance(result, nn.Linear) and result.out_features == 1):
        raise BirlError(f"{type(model).__name__} has a module `{name}` of its own that does not give one number.")
    return result
