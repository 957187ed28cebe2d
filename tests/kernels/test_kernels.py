"""Each kernel against PyTorch in float64 or float32, and the promise that a row's bits depend on nothing else."""

# Lists of tensors are handed on by their star:
# pyright: reportCallIssue=false

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from birl import kernels
from birl.data.trees import Tree
from birl.engine.pages import sharing
from birl.kernels import KEEP, SWIGLU, Kernels, compiling
from birl.kernels.instructions import marches
from birl.kernels.tensors import PackedWeight
from birl.models.attention import Packed, tree_mask
from birl.models.paged import Cache, Paged, Slot
from birl.models.quantized import rounded

pytestmark = pytest.mark.skipif(bool(kernels.problem()), reason=f"no kernels: {kernels.problem()}")
BOTH = pytest.mark.parametrize("k", [torch.float32, torch.bfloat16], indirect=True)
TREES = [Tree.of(45, (12, 33, 1)), Tree.of(7), Tree.of(32, (40, 40)), Tree.of(1, (3, 2))]
TREES += [Tree.of(45, (12, (33, (1, (70, (9, 40)))), 1)), Tree.of(500, (300, 40))]
HEADS, KV_HEADS, SIZE = 6, 2, 32


@pytest.fixture
def k(request: pytest.FixtureRequest) -> Kernels:
    found = kernels.load(request.param, SIZE)
    assert found is not None
    return found


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, k: Kernels, scale: float = 1.0) -> None:
    bound = (1e-5 if k.dtype == torch.float32 else 2e-2) * scale
    torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=bound)


@BOTH
def test_norm_and_its_gradient(k: Kernels) -> None:
    x, w, g = rand(9, 64), rand(64, seed=1, dtype=k.dtype), rand(9, 64, seed=2, dtype=k.dtype)
    rstd = torch.empty(9)
    leaf, weight = x.clone().requires_grad_(), w.float().requires_grad_()
    wanted = F.rms_norm(leaf, (64,), weight, 1e-5)
    close(k.rms_norm(x, w, 1e-5, rstd), wanted.detach(), k)
    wanted.backward(g.float())
    total = rand(9, 64, seed=3)
    before = total.clone()
    rounded = torch.empty_like(g)
    by_weight = k.rms_norm_backward(x, w, rstd, g, total, rounded)
    assert leaf.grad is not None and weight.grad is not None
    torch.testing.assert_close(total - before, leaf.grad, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(by_weight, weight.grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(rounded, total.to(k.dtype))


@BOTH
def test_rotary_turns_and_turns_back(k: Kernels) -> None:
    angles = rand(11, SIZE // 2)
    cosine, sine = angles.cos(), angles.sin()
    rows = rand(11, 4 * SIZE, seed=1, dtype=k.dtype)
    turned = rows.clone()
    k.rotary(turned, 3, cosine, sine)
    heads = rows.float().view(11, 4, 2, SIZE // 2)
    a, b = heads[:, :3, 0], heads[:, :3, 1]
    c, s = cosine[:, None], sine[:, None]
    close(turned.view(11, 4, -1)[:, :3], torch.cat([a * c - b * s, b * c + a * s], -1), k)
    assert torch.equal(turned[:, 3 * SIZE :], rows[:, 3 * SIZE :])
    k.rotary(turned, 3, cosine, sine, inverse=True)
    close(turned, rows, k, 2)


@BOTH
def test_swiglu_and_its_gradient(k: Kernels) -> None:
    both, g = rand(5, 96, dtype=k.dtype) * 4, rand(5, 48, seed=1, dtype=k.dtype)
    leaf = both.float().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    wanted = F.silu(gate) * up
    close(k.swiglu(both), wanted.detach(), k)
    wanted.backward(g.float())
    by_both = both.clone()
    again = k.swiglu_backward(by_both, g)
    close(again, wanted.detach(), k)
    assert leaf.grad is not None
    close(by_both, leaf.grad, k)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 70, 300])
@pytest.mark.parametrize("shape", [(32, 32), (48, 64), (16, 96), (112, 576)])
@pytest.mark.parametrize("k", [torch.bfloat16], indirect=True)
def test_products(k: Kernels, rows: int, shape: tuple[int, int]) -> None:
    x, w, bias = (rand(*s, seed=i, dtype=k.dtype) for i, s in enumerate([(rows, shape[1]), shape, (shape[0],)]))
    packed = k.pack([w[:16], w[16:]]) if shape[0] > 16 else k.pack([w])
    exact = x.double() @ w.double().T
    found = k.gemm_float(x, packed)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(k.gemm_float(x, packed, bias), found + bias.float())
    assert torch.equal(k.gemm(x, packed), found.bfloat16())
    total = rand(rows, shape[0], seed=7)
    assert torch.equal(k.gemm(x, packed, add_to=total.clone()), total + found)
    for part in (slice(0, 1), slice(rows // 2, rows)):  # alone or among others: the same bits
        assert torch.equal(k.gemm_float(x[part].contiguous(), packed), found[part])
    assert torch.equal(k.gemm_float(x, k.pack([w[:16]])), found[:, :16])


@pytest.mark.parametrize("k", [torch.bfloat16], indirect=True)
def test_products_of_any_number_of_rows_have_the_same_bits(k: Kernels) -> None:
    """Few rows go by in another order than many, and in passes that depend on how many they are."""
    x, w = rand(300, 160, dtype=k.dtype), rand(80, 160, seed=1, dtype=k.dtype)
    packed = k.pack([w])
    every = k.gemm_float(x, packed)
    for rows in range(1, 161):
        beyond = torch.full((rows + 1, 80), 7.0)
        k._gemm(x[:rows], packed, None, beyond[:rows], KEEP)
        assert torch.equal(beyond[:rows], every[:rows]) and (beyond[rows] == 7).all()


@pytest.mark.parametrize("shape", [(32, 32), (80, 160), (16, 576)])
@pytest.mark.parametrize("k", [torch.bfloat16], indirect=True)
def test_products_with_int8_have_the_bits_of_those_with_the_weights_it_holds(
    k: Kernels, shape: tuple[int, int]
) -> None:
    """For any number of rows, which go by in three ways; blocks of zeros, of tiny and of large weights."""
    w = rand(*shape, seed=1, dtype=k.dtype)
    w[0, :32], w[1, :32], w[2, 5], w[3] = 0, w[1, :32] * 2**-100, 300, 127 / 64
    held = rounded(w)
    packed, codes = k.pack([held]), k.encode([w])
    assert torch.equal(codes.data, k.encode([held]).data) and codes.data.nbytes * 64 == packed.data.nbytes * 33
    x = rand(300, shape[1], dtype=k.dtype)
    every = k.gemm_float(x, codes)
    torch.testing.assert_close(every.double(), x.double() @ held.double().T, atol=2e-4, rtol=1e-5)
    for rows in (*range(1, 35), 48, 64, 128, 129, 300):
        assert torch.equal(k.gemm_float(x[:rows], codes), every[:rows])
        assert torch.equal(k.gemm_float(x[:rows], packed), every[:rows])
    both, turns = k.encode([w, w.flip(0)]), k.encode([w, w.flip(0)], halves=True)
    assert torch.equal(k.gemm(x[:3], both), k.gemm(x[:3], turns))


@pytest.mark.parametrize("rows", [1, 20, 64, 129, 300])
@pytest.mark.parametrize("k", [torch.bfloat16], indirect=True)
def test_weights_whose_panels_take_turns_give_the_same_products(k: Kernels, rows: int) -> None:
    x = rand(rows, 96, dtype=k.dtype)
    gate, up = rand(80, 96, seed=1, dtype=k.dtype), rand(80, 96, seed=2, dtype=k.dtype)
    plain, turns = k.pack([gate, up]), k.pack([gate, up], halves=True)
    assert not torch.equal(plain.data, turns.data)
    both = k.gemm(x, turns)
    assert torch.equal(both, k.gemm(x, plain))
    inner = torch.full((rows + 1, 80), 7, dtype=k.dtype)
    k._gemm(x, turns, None, inner[:rows], SWIGLU)  # as while decoding: gate and up are never in memory
    assert torch.equal(inner[:rows], k.swiglu(both)) and (inner[rows] == 7).all()


@pytest.mark.parametrize("rows", [1, 31, 64, 70])
@pytest.mark.parametrize("k", [torch.bfloat16], indirect=True)
def test_products_of_the_backward_pass(k: Kernels, rows: int) -> None:
    x, grad = rand(rows, 64, dtype=k.dtype), rand(rows, 96, seed=1, dtype=k.dtype)
    weights = [rand(n, 64, seed=n, dtype=k.dtype) for n in (64, 32)]
    found = k.gemm_float(grad, k.pack(weights, transposed=True))
    torch.testing.assert_close(found.double(), grad.double() @ torch.cat(weights).double(), atol=1e-4, rtol=1e-5)
    packed = k.pack([x], transposed=True)
    for part in (grad, grad[:, 32:], grad[:, :48]):  # of several weights each takes its columns
        into = torch.full((part.shape[1], 64), torch.nan)
        k.outer(part, packed, into, add=False)
        torch.testing.assert_close(into.double(), part.double().T @ x.double(), atol=1e-4, rtol=1e-5)
        twice = into.clone()
        k.outer(part, packed, twice, add=True)
        assert torch.equal(twice, 2 * into)


def inputs(k: Kernels) -> torch.Tensor:
    return rand(sum(map(len, TREES)), (HEADS + 2 * KV_HEADS) * SIZE, dtype=k.dtype)


def split(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.view(len(rows), -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)


@pytest.mark.parametrize("window", [0, 20, 290])
@BOTH
def test_tree_attention_and_its_gradient(k: Kernels, window: int) -> None:
    rows = inputs(k)
    leaf = rows.float().requires_grad_()
    mask = torch.block_diag(*(tree_mask(t, window or None).int() for t in TREES)).bool()
    q, key, v = (x.transpose(0, 1)[None] for x in split(leaf))
    wanted = F.scaled_dot_product_attention(q, key, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    wanted = wanted[0].transpose(0, 1).reshape(len(rows), -1)
    segments = Packed(TREES).segments
    out, lse = k.tree_attention(*split(rows), segments, 0.3, window)
    close(out, wanted.detach(), k)
    g = rand(*out.shape, seed=5, dtype=k.dtype)
    wanted.backward(g.float())
    grads = torch.full_like(rows, torch.nan)
    k.tree_attention_backward(*split(rows), out, lse, g, split(grads), segments, 0.3, window)
    assert leaf.grad is not None
    close(grads, leaf.grad, k, 3)


@pytest.mark.parametrize("window", [0, 20])
@BOTH
def test_paged_attention_gives_the_bits_of_tree_attention(k: Kernels, window: int) -> None:
    """One token after another over shuffled pages, a prompt's full pages shared, equals the packed tree."""
    rows = inputs(k)
    out, _ = k.tree_attention(*split(rows), Packed(TREES).segments, 0.3, window)
    cache = Cache.make(12, [Slot(0, HEADS, KV_HEADS, SIZE, SIZE)], k.dtype, torch.device("cpu"))
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)  # what was never written must not matter
    tables = [[9, 3, 1], [9, 5, 2], [9, 7, 4]]

    def attend(places: list[int], which: list[int], lengths: list[int], groups: list[int], shared: list[int]):
        layout = Paged.of(cache, [tables[w] for w in which], lengths, groups, shared)
        found, _ = layout.attend_rows(0, k, *split(rows[torch.tensor(places)]), 0.3, window)
        assert torch.equal(found, out[torch.tensor(places)])

    prefix = list(range(45))
    attend(prefix, [0] * 45, [i + 1 for i in prefix], [8] * 5 + [5], [i // 32 for i in range(0, 45, 8)])
    for target in (5, 7):
        cache.copy_pages([(3, target)])
    for step in range(12):
        places = [45 + step, 57 + step, *([90] if step == 0 else [])]
        n = len(places)
        attend(places, list(range(n)), [46 + step] * n, [n], [1])


@pytest.mark.parametrize("window", [0, 700])
@BOTH
def test_long_sequences_have_the_same_bits_in_trees_and_pages(k: Kernels, window: int) -> None:
    """Longer than the blocks of keys that a softmax goes through: a prompt in two parts, then two branches at once."""
    rows = rand(1149, (HEADS + 2 * KV_HEADS) * SIZE, dtype=k.dtype)
    out, _ = k.tree_attention(*split(rows), Packed([Tree.of(1100, (9, 40))]).segments, 0.3, window)
    cache = Cache.make(38, [Slot(0, HEADS, KV_HEADS, SIZE, SIZE)], k.dtype, torch.device("cpu"))
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    one, other = [*range(0, 35)], [*range(0, 34), 36, 37]
    for start, end, copies, tables in (
        (0, 500, [], [one] * 500), (500, 1100, [(34, 36)], [one] * 600), (1100, 1149, [], [one] * 9 + [other] * 40)
    ):  # fmt: skip
        lengths = [i + 1 if i < 1109 else i - 8 for i in range(start, end)]
        found, _ = Paged.of(cache, tables, lengths, *sharing(tables, lengths)).attend_rows(
            0, k, *split(rows[start:end]), 0.3, window
        )
        assert torch.equal(found, out[start:end])
        cache.copy_pages(copies)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_decoding_with_any_number_of_queries_to_a_key_has_the_bits_of_training(group: int) -> None:
    """Few queries read two pages of keys, or 64 columns of values, at once; sequences end anywhere in a page."""
    k = kernels.load(torch.bfloat16, 64)
    assert k is not None
    heads, tree = 2 * group, [Tree.of(70, (60, 9))]
    rows = rand(139, (heads + 4) * 64, dtype=k.dtype).view(139, -1, 64)
    query, key, value = rows.split([heads, 2, 2], dim=1)
    out, _ = k.tree_attention(query, key, value, Packed(tree).segments, 0.3)
    cache = Cache.make(9, [Slot(0, heads, 2, 64, 64)], k.dtype, torch.device("cpu"))
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    tables = [[4, 3, 2, 1, 0], [4, 3, 8, 7, 6]]

    def attend(places: list[int], which: list[int], lengths: list[int], groups: list[int], shared: list[int]) -> None:
        layout = Paged.of(cache, [tables[w] for w in which], lengths, groups, shared)
        at = torch.tensor(places)
        assert torch.equal(layout.attend_rows(0, k, query[at], key[at], value[at], 0.3)[0], out[at])

    attend(list(range(70)), [0] * 70, list(range(1, 71)), [1] * 70, [0] * 70)
    cache.copy_pages([(2, 8)])
    for step in range(60):
        places = [70 + step, *([130 + step] if step < 9 else [])]
        attend(places, list(range(len(places))), [71 + step] * len(places), [len(places)], [2])


@BOTH
def test_logprobs_and_their_gradient(k: Kernels) -> None:
    logits, targets = rand(7, 1003) * 5, torch.randint(0, 1003, (7,), generator=torch.Generator().manual_seed(1))
    leaf = logits.double().requires_grad_()
    log = (leaf / 0.7).log_softmax(-1)
    logp, entropy = log.gather(1, targets[:, None])[:, 0], -(log.exp() * log).sum(-1)
    found, norm, found_entropy = k.logprobs(logits, targets, 0.7)
    torch.testing.assert_close(found.double(), logp.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy.double(), entropy.detach(), atol=1e-5, rtol=1e-5)
    a, b = rand(7, seed=2), rand(7, seed=3)
    (logp * a + entropy * b).sum().backward()
    words, parts = logits.T.contiguous(), [slice(0, 512), slice(512, 1003)]
    found = [
        k.logprobs_backward(words[p].contiguous(), targets, 0.7, norm, found_entropy, a, b, p.start) for p in parts
    ]
    assert leaf.grad is not None
    close(torch.cat(found)[:, :7], leaf.grad.T, k)
    assert (torch.cat(found)[:, 7:] == 0).all() and found[0].shape == (512, 32)


def test_samples_follow_the_distribution_and_their_logprobs_are_the_learners() -> None:
    k = kernels.load(torch.float32, SIZE)
    assert k is not None
    logits = rand(1, 3000, seed=4) * 3
    logits[0, 100:1200] = -torch.inf
    n = 20_000
    uniforms = (torch.arange(n) + 0.5) / n
    tokens, logp = k.sample(logits.expand(n, -1).contiguous(), torch.full((n,), 0.8), uniforms)
    p = (logits[0].double() / 0.8).softmax(-1)
    counts = torch.bincount(tokens, minlength=3000).double()
    assert (counts - n * p).abs().max() <= 2.1  # evenly spaced numbers: each word gets its share, rounded
    assert (tokens.diff() >= 0).all()
    again, _, _ = k.logprobs(logits.expand(n, -1).contiguous(), tokens, 0.8)
    assert torch.equal(logp, again)
    ends, _ = k.sample(logits.expand(2, -1).contiguous(), torch.ones(2), torch.tensor([0.0, 1.0]))
    assert p[ends[0]] > 0 and p[ends[1]] > 0
    best, logp = k.sample(logits, torch.zeros(1), torch.zeros(1))
    assert best == logits.argmax() and logp.item() == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-5)


def headed(rows: int, words: int, biased: bool) -> tuple[Kernels, torch.Tensor, PackedWeight, torch.Tensor | None]:
    k = kernels.load(torch.bfloat16, SIZE)
    assert k is not None
    bias = rand(words, seed=3).bfloat16() if biased else None
    return k, rand(rows, 96, seed=1).bfloat16(), k.pack([(rand(words, 96, seed=2) * 0.4).bfloat16()]), bias


@pytest.mark.parametrize("rows", [1, 7, 40, 128, 131])
@pytest.mark.parametrize("words", [16, 1008, 3040])  # less than a cell; a stretch that is not full; several
@pytest.mark.parametrize("biased", [False, True])
def test_the_head_draws_what_is_drawn_from_its_logits(rows: int, words: int, biased: bool) -> None:
    k, hidden, packed, bias = headed(rows, words, biased)
    temperatures = torch.tensor([1.0, 0.0, 0.7, 0.01]).repeat(rows)[:rows]
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(4))
    uniforms[-1] = 1.0
    tokens, logp = k.head_sample(hidden, packed, bias, temperatures, uniforms)
    wanted = k.sample(k.gemm_float(hidden, packed, bias), temperatures, uniforms)
    assert torch.equal(tokens, wanted[0]) and torch.equal(logp, wanted[1])
    assert not biased or words < 1000 or rows < 40 or len(tokens.unique()) > 10  # it is not one word for all


@pytest.mark.parametrize("rows", [1, 40, 131])
@pytest.mark.parametrize("words", [16, 1008, 3040])
@pytest.mark.parametrize("biased", [False, True])
def test_the_head_gives_the_log_probs_of_its_logits(rows: int, words: int, biased: bool) -> None:
    k, hidden, packed, bias = headed(rows, words, biased)
    targets = torch.randint(0, words, (rows,), generator=torch.Generator().manual_seed(4))
    found = k.head_logprobs(hidden, packed, bias, targets, 0.8)
    wanted = k.logprobs(k.gemm_float(hidden, packed, bias), targets, 0.8)
    assert all(map(torch.equal, found, wanted))
    assert rows == 1 or wanted[0].std() > 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_head_tells_of_logits_that_are_no_numbers(value: float) -> None:
    k = kernels.load(torch.bfloat16, SIZE)
    assert k is not None
    hidden, packed = rand(4, 32).bfloat16(), k.pack([rand(2000, 32, seed=2).bfloat16()])
    bias = torch.zeros(2000, dtype=torch.bfloat16)
    bias[1500:1600] = value
    for temperature in (1.0, 0.0):
        tokens, logp = k.head_sample(hidden, packed, bias, torch.full((4,), temperature), torch.full((4,), 0.9))
        if value == -float("inf"):
            assert logp.isfinite().all() and not ((tokens >= 1500) & (tokens < 1600)).any()
        else:
            assert logp.isnan().all()


SCRIPT = """
import torch
from birl import kernels
k = kernels.load(torch.bfloat16, 32)
print(k is not None, "|", kernels.problem())
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
assert len(maps) == 1, maps
"""


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, "True |"),
        ({"BIRL_KERNELS": "0"}, "False | switched off by BIRL_KERNELS=0"),
        ({"CC": "nowhere", "PATH": "/nowhere"}, "False | no C compiler"),
        ({"CC": "false"}, "False | they do not compile"),
    ],
)
def test_without_a_compiler_everything_else_works(tmp_path: Path, change: dict[str, str], expected: str) -> None:
    """And with one, there is a single OpenMP runtime: a second would fight with PyTorch's for the cores."""
    environment = {"PATH": "/usr/bin:/bin", "BIRL_CACHE": str(tmp_path), "PYTHONPATH": str(Path.cwd()), **change}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)


@pytest.mark.parametrize("flags", [["-DBF16"], []], ids=["bfloat16", "float32"])
def test_no_pointer_is_passed_for_another_type(flags: list[str]) -> None:
    """GCC 14 refuses to compile that."""
    words = ("-fsyntax-only", "-fopenmp", "-Werror=incompatible-pointer-types", "-DHEAD_DIM=64", *flags)
    command = [compiling.compiler() or "cc", *words, f"-march={marches()[0]}", *compiling.SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
