"""What an architecture does to its logits behind its head: a factor (Cohere, Granite, Falcon-H1), or a soft cap (Gemma
2, arXiv:2408.00118 section 2). Both come from the config, where the model's own forward reads them there; `verify`
compares the result with that forward."""

import inspect
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # its power
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
KNOWN: "WeakKeyDictionary[nn.Module, AfterHead | None]" = WeakKeyDictionary()


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
    """None where the head's output is the logits."""
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
