"""Log-probs and entropies of a vocabulary that is split over ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from birl.models import logprobs
from birl.models.logprobs import token_logprobs
from birl.parallel.ranks import Grid, Ranks
from birl.parallel.tensor import place
from tests.parallel.processes import on_ranks

N, H, V = 23, 8, 50
CHUNK = 90  # logits at once


def numbers(ranks: Ranks, temperature: float, bias: bool) -> dict[str, Any]:
    """Log-probs, entropies and gradients, whole; how many logits there were at once, and what the ranks told each
    other."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(H, V, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(N, H, generator=generator, requires_grad=True)
    targets = torch.randint(0, V, (N,), generator=generator)
    up = torch.randn(2, N, generator=generator)
    if ranks.mesh is not None:
        for name in dict(head.named_parameters()):
            place(head, name, 0, ranks.mesh["tp"])
    shapes, sent = [], []
    with pytest.MonkeyPatch.context() as patches:
        plain, reduce = logprobs.scaled_logits, dist.all_reduce

        def logits(*arguments: Any) -> Tensor:
            found = plain(*arguments)
            shapes.append(tuple(found.shape))
            return found

        def all_reduce(tensor: Tensor, *rest: Any, **options: Any) -> Any:
            sent.append(tensor.numel())
            return reduce(tensor, *rest, **options)

        patches.setattr(logprobs, "scaled_logits", logits)
        patches.setattr(dist, "all_reduce", all_reduce)
        logp, entropy = token_logprobs(hidden, head, targets, temperature, chunk=CHUNK)
        (logp * up[0] + entropy * up[1]).sum().backward()
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in head.named_parameters()}
    found = {"logp": logp.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, **grads}
    return {"found": found, "shapes": shapes, "sent": sum(sent)}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(("temperature", "bias"), [(1.0, False), (0.6, True)])
def test_parts_give_the_value_and_gradient_of_the_whole(tp: int, temperature: float, bias: bool) -> None:
    """3 does not divide the vocabulary. No rank has logits of others' words, or learns anything of size [N, V]."""
    wanted = numbers(Ranks(), temperature, bias)["found"]
    for rank in on_ranks(Grid(tp=tp), numbers, temperature, bias):
        for name, value in wanted.items():
            torch.testing.assert_close(rank["found"][name], value, atol=1e-5, rtol=1e-5)
        assert max(words for _, words in rank["shapes"]) <= -(-V // tp)
        assert max(rows * words for rows, words in rank["shapes"]) <= CHUNK
        assert rank["sent"] == 4 * N + N * H  # maxima, sums, log-probs and entropies; the gradient by the hidden states


def far_apart(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """One word of 6 has all the probability, and its rank alone knows."""
    head = nn.Linear(1, 6, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [1.0], [2.0], [0.0], [200.0], [1.0]]))
    if ranks.mesh is not None:
        place(head, "weight", 0, ranks.mesh["tp"])
    with torch.no_grad():
        return token_logprobs(torch.ones(6, 1), head, torch.arange(6))


def test_certainty_on_one_rank_is_exact() -> None:
    logp, entropy = on_ranks(Grid(tp=2), far_apart)[0]
    assert logp.tolist() == [-200.0, -199.0, -198.0, -200.0, 0.0, -199.0]
    assert entropy.abs().max() < 1e-30
