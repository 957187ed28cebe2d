import random
import subprocess
import sys

import pytest
import torch

from birl.data.support import SupportRows
from birl.models import attention, logprobs, shape
from birl.models.decoder import decoder_for
from birl.models.forward import logits
from birl.models.heads import AfterHead
from birl.models.logprobs import float_logits, token_logprobs
from birl.models.shape import CHUNK
from birl.samples import Support
from tests.tiny import tiny_model


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


def test_logits_never_exist_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever N and V are, no more than CHUNK logits are alive at once; here all of them would be twice that."""
    head = torch.nn.Linear(4, 8192)
    n = 2 * CHUNK // 8192
    sizes: list[int] = []

    def spy(*args: torch.Tensor) -> torch.Tensor:
        sizes.append(args[0].shape[0] * args[1].shape[0])
        return float_logits(*args)

    monkeypatch.setattr(logprobs, "float_logits", spy)
    logp, _ = token_logprobs(torch.randn(n, 4, requires_grad=True), head, torch.zeros(n, dtype=torch.long))
    logp.sum().backward()
    assert max(sizes) <= CHUNK and sum(sizes) == 4 * CHUNK


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_bfloat16_weights_are_not_rounded(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Logits of size 10 are up to 0.03 away from themselves in bfloat16."""
    monkeypatch.setattr(shape, "WIDENED", 700)  # 10 of 50 words at once
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 50, bias=bias)
    head.weight.data.normal_(0, 1, generator=generator)
    head = head.bfloat16()
    hidden = torch.randn(23, 64, generator=generator).bfloat16().requires_grad_()
    targets, up = torch.randint(0, 50, (23,), generator=generator), torch.randn(23, generator=generator)
    parameters = [hidden, *head.parameters()]

    logp, entropy = token_logprobs(hidden, head, targets, 0.7, chunk=250)
    results = torch.autograd.grad((logp * up + entropy).sum(), parameters)
    exact = [p.detach().double().requires_grad_() for p in parameters]
    full = (torch.nn.functional.linear(*exact) / 0.7).log_softmax(-1)
    wanted, spread = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    expected = torch.autograd.grad((wanted * up + spread).sum(), exact)

    torch.testing.assert_close(logp.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), spread, atol=1e-5, rtol=1e-5)
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, atol=0.02, rtol=0.01)


def test_the_engine_has_the_learners_logits_where_there_are_no_kernels() -> None:
    model = tiny_model(heads=4, kv_heads=2).bfloat16()
    model.set_attn_implementation(attention.NAME)
    hidden = 3 * torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        result = logits(model, hidden)
    weight = model.lm_head.weight.detach()
    torch.testing.assert_close(result.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=1e-5)
    assert torch.equal(result, float_logits(hidden, weight, None))


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
learner = Learner(model, dtype=torch.float32)

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
train(1000)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss has other units elsewhere")
def test_the_peak_does_not_grow_with_vocabulary_times_tokens() -> None:
    """1,000 tokens of 65,536 words: one copy of all logits would be 250 MiB in float32."""
    done = subprocess.run([sys.executable, "-c", PEAK, "65536"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 65536 * 1000 * 4 / 2


def drawn_from(sets: list[list[int]]) -> SupportRows:
    return SupportRows.of(Support(counts=tuple(map(len, sets)), ids=tuple(i for s in sets for i in sorted(s))))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["plain", "capped", "float32", "bfloat16"])
def test_with_supports_they_are_those_of_the_words_that_are_left(kind: str, temperature: float) -> None:
    """Value, entropy and gradient, against a log-softmax of -inf elsewhere, in float64; with the kernels' head, too. A
    support may be one word, a few in any chunk, or everything."""
    rng, words, rows = random.Random(0), 320, 45
    sets = [sorted(rng.sample(range(words), rng.choice([1, 2, 5, 60, 200]))) for _ in range(rows)]
    targets = torch.tensor([rng.choice(own) for own in sets])
    sets[7], sets[30] = [], []
    model = tiny_model().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    model.set_attn_implementation(attention.NAME)
    decoder = decoder_for(model) if kind in ("float32", "bfloat16") else None
    if kind in ("float32", "bfloat16") and decoder is None:
        pytest.skip("no kernels here")
    generator = torch.Generator().manual_seed(0)
    head = model.lm_head
    hidden = (3 * torch.randn(rows, 64, generator=generator)).to(head.weight.dtype).requires_grad_()
    up = torch.randn(2, rows, generator=generator)
    after = AfterHead(scale=0.5, cap=3.0) if kind == "capped" else None
    logp, entropy = token_logprobs(hidden, head, targets, temperature, 320 * 50 // 7, decoder, after, drawn_from(sets))
    (logp * up[0] + entropy * up[1]).sum().backward()
    exact = [p.detach().double().requires_grad_() for p in (hidden, head.weight)]
    logits = exact[0] @ exact[1].T
    logits = (logits if after is None else 3.0 * (0.5 * logits / 3.0).tanh()) / temperature
    left = torch.zeros(rows, words, dtype=torch.bool)
    for row, own in enumerate(sets):
        left[row, own or slice(None)] = True
    full = logits.masked_fill(~left, -1e30).log_softmax(-1)
    wanted, spread = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    expected = torch.autograd.grad((wanted * up[0] + spread * up[1]).sum(), exact)
    torch.testing.assert_close(logp.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), spread, atol=1e-5, rtol=1e-5)
    close = {"atol": 0.05, "rtol": 0.02} if kind == "bfloat16" else {"atol": 1e-5, "rtol": 1e-4}
    for found, want in zip((hidden.grad, head.weight.grad), expected, strict=True):
        torch.testing.assert_close(found.double(), want, **close)  # pyright: ignore


def test_supports_of_some_rows() -> None:
    """In any order, as ranks of a row have them."""
    sets = [[1, 2], [], [5], [0, 3, 4], []]
    own = drawn_from(sets).rows(torch.tensor([3, 1, 0, 2]))
    wanted = drawn_from([sets[i] for i in (3, 1, 0, 2)])
    assert own.ids.tolist() == wanted.ids.tolist() and list(own.starts) == list(wanted.starts)
    assert own.outside(slice(1, 4), 1, 4).int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
