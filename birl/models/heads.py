"""A score in the place of the next token: reward models and critics.

The head is a submodule `score` of the causal language model, as transformers' ...ForSequenceClassification has one, so
a reward model is saved in that standard form. The body, its kernels and its packing are those of the language model;
the language model's own head is left alone, and frozen where it is not tied to the embedding.
"""

import torch
from torch import nn

from birl.errors import BirlError
from birl.models.device import device_of
from birl.models.forward import head

HEADS = ("score", "value")


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


def scores(hidden: torch.Tensor, score: nn.Linear) -> torch.Tensor:
    """[N, H] -> [N] float32; bfloat16 has three digits, too few to tell scores apart."""
    return hidden.float() @ score.weight[0].float()


def score_head(model: nn.Module, name: str = "score") -> nn.Linear | None:
    result = getattr(model, name, None)
    if result is not None and not (isinstance(result, nn.Linear) and result.out_features == 1):
        raise BirlError(f"{type(model).__name__} has a module `{name}` of its own that does not give one number.")
    return result
