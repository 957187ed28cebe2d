"""Output heads of a model: the LM head and the scaling of logits after it, a factor (Cohere, Granite, Falcon-H1) or a
soft cap (Gemma 2, arXiv:2408.00118 section 2); and a scalar score head instead of it.

A reward model's or critic's head is a submodule `score` of the causal language model, as in transformers'
...ForSequenceClassification, so a reward model is saved in that standard form. The body, its kernels and its packing
are those of the language model; its LM head is unchanged, and frozen if it is not tied to the embedding.
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
FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # exponent of each factor
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
KNOWN: "WeakKeyDictionary[nn.Module, AfterHead | None]" = WeakKeyDictionary()


def head(model: nn.Module) -> nn.Linear:
    """The LM head: hidden states -> logits."""
    return model.get_output_embeddings()  # pyright: ignore


@dataclass(frozen=True, slots=True)
class AfterHead:
    """logits = cap tanh(scale x / cap), or scale x without a cap; x is the head's output."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Apply it in place to float32."""
        x = x.mul_(self.scale)
        return x if self.cap is None else x.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of each logit with respect to x."""
        return self.scale if self.cap is None else (logits / self.cap).square_().neg_().add_(1.0).mul_(self.scale)


def after_head(model: nn.Module) -> AfterHead | None:
    """The scaling after the LM head, read from the config if the model's forward reads it; None if there is none."""
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
    """Add a linear map of the last hidden state to one number: `model.score`, [1, H] float32. With the name "value" it
    is a critic's head beside the LM head, not instead of it.

    Small random weights (standard deviation 1 / (H + 1), Stiennon et al. arXiv:2009.01325 appendix B.1), so that all
    scores start near 0 and much closer together than trained scores. An existing head is kept.
    """
    if score_head(model, name) is not None:
        return
    width = head(model).weight.shape[1]
    score = nn.Linear(width, 1, bias=False, device=device_of(model), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    score.weight.data.copy_(torch.randn(1, width, generator=generator, dtype=torch.float32) / (width + 1))
    model.add_module(name, score)


def scores(hidden: Tensor, score: nn.Linear) -> Tensor:
    """[N, H] -> [N] float32; bfloat16 has three digits, too few to distinguish scores."""
    return hidden.float() @ score.weight[0].float()


def score_head(model: nn.Module, name: str = "score") -> nn.Linear | None:
    result = getattr(model, name, None)
    if result is not None and not (isinstance(result, nn.Linear) and result.out_features == 1):
        raise BirlError(f"{type(model).__name__} has a module `{name}` of its own that does not give one number.")
    return result
