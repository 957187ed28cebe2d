import subprocess
import sys

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


PEAK = """
import resource, sys
import torch
from birl.allocator import keep_memory
keep_memory()
from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.types import Sample
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=int(sys.argv[1]), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True))
model.set_attn_implementation(attention.NAME)
learner = Learner(model, dtype=torch.bfloat16)

def train(tokens):
    samples = [
        Sample(tokens=tuple(range(n, n + 101)), mask=(False, *[True] * 100), logprobs=(0.0,) * 101,
               versions=(-1, *[0] * 100), advantage=1.0, group=n, episode=0)
        for n in range(tokens // 100)
    ]
    for batch in pack(samples, [1.0] * len(samples), 10**6):
        loss = lambda logp, entropy, batch: (-(logp * batch.advantages).sum() + entropy.sum(), {"entropy": entropy})
        learner.forward_backward(batch, loss, Stats())

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

train(100)
before = peak()
train(2000)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss has other units elsewhere")
def test_the_peak_does_not_grow_with_vocabulary_times_tokens() -> None:
    """2,000 tokens of 65,536 words: one copy of all logits would be 500 MiB in float32."""
    done = subprocess.run([sys.executable, "-c", PEAK, "65536"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 65536 * 2000 * 4 / 2
