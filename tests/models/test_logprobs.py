import pytest
import torch

from birl.models.logprobs import CHUNK, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_value_and_gradient_of_the_whole(temperature: float, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=bias)
    hidden = torch.randn(23, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (23,), generator=generator)
    up = torch.randn(23, generator=generator), torch.randn(23, generator=generator)
    parameters = [hidden, *head.parameters()]

    logp, entropy = token_logprobs(hidden, head, targets, temperature, chunk=250)
    found = torch.autograd.grad((logp * up[0] + entropy * up[1]).sum(), parameters)
    full = (head(hidden) / temperature).log_softmax(-1)
    expected_logp = full.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(full.exp() * full).sum(-1)
    expected = torch.autograd.grad((expected_logp * up[0] + expected_entropy * up[1]).sum(), parameters)

    torch.testing.assert_close(logp, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_temperature_matters() -> None:
    head = torch.nn.Linear(8, 50)
    hidden, targets = torch.randn(4, 8), torch.arange(4)
    cold, warm = token_logprobs(hidden, head, targets, 0.5)[0], token_logprobs(hidden, head, targets, 1.0)[0]
    assert not torch.allclose(cold, warm)


def test_logits_never_exist_for_all_tokens() -> None:
    """Whatever N and V are, no more than CHUNK logits are alive at once; here all of them would be twice that."""
    head = torch.nn.Linear(4, 8192)
    n = 2 * CHUNK // 8192
    sizes: list[int] = []
    original = torch.nn.functional.linear

    def spy(*args: torch.Tensor) -> torch.Tensor:
        result = original(*args)
        sizes.append(result.numel())
        return result

    torch.nn.functional.linear = spy  # type: ignore[assignment]
    try:
        logp, _ = token_logprobs(torch.randn(n, 4, requires_grad=True), head, torch.zeros(n, dtype=torch.long))
        logp.sum().backward()
    finally:
        torch.nn.functional.linear = original
    assert max(sizes) <= CHUNK and sum(sizes) == 4 * CHUNK
