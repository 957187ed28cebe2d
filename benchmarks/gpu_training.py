"""Training on packed tokens, for `benchmarks.gpu`."""

from functools import partial

from torch import nn

from benchmarks.gpu_bench import Bench, Sizes, loss, samples, shape_of
from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Stats
from birl.models.shape import Shape

TRAIN_GOAL = 0.5


def flops(model: nn.Module, batch: Batch) -> float:
    """FLOPs of a forward and backward pass without recomputation: 6 per weight and token, 12 per head element and
    visible pair of tokens."""
    shape = Shape.of_model(model)
    pairs = sum(tree.pairs() for tree in batch.trees)
    products = shape.active * len(batch.tokens) + shape.embedding * len(batch.targets)
    return 6.0 * products + 3 * shape.pair_flops * pairs


def training(bench: Bench) -> None:
    for name in bench.models:
        train_model(bench, Learner(bench.model(name)), name)
        bench.clean()


def rows(tokens: int, sizes: Sizes, words: int) -> Batch:
    """Trees of a prompt and seven answers, in at most `tokens` tokens."""
    data = samples(max(tokens // (8 * sizes.answer), 1), 7, sizes.answer, sizes.answer, words)
    (batch,) = pack(data, [1 / len(data)] * len(data), tokens)
    return batch


def train_model(bench: Bench, learner: Learner, name: str) -> None:
    sizes, words = bench.sizes, shape_of(learner.model).vocab_size
    for tokens in sizes.packed:
        if bench.left < 30:
            bench.add("training", f"{name}, {tokens} packed tokens", note="left out: no time")
            continue
        batch = rows(tokens, sizes, words).to(bench.device)
        seconds = bench.seconds(partial(learner.forward_backward, batch, loss, Stats()), sizes.repeats)
        note = f"{flops(learner.model, batch) / seconds / 1e12:.1f} TFLOP/s; {1e3 * seconds:.1f} ms"
        speed = len(batch.tokens) / seconds
        bench.add("training", f"{name}, {tokens} packed tokens", speed, goal=TRAIN_GOAL, note=note)
    seconds = bench.seconds(partial(learner.optim_step, 1e-6), 3, warm=1)
    bench.add("training", f"{name}, optimizer step", 1e3 * seconds)
