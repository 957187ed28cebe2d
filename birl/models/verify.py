"""Verifies before a model is used that birl's forward passes compute it correctly."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from birl.data.trees import Tree, ways
from birl.errors import BirlError, first_line
from birl.kernels.tensors import PAGE
from birl.models.attention import Packed, places
from birl.models.forward import forget, hidden_states, logits
from birl.models.heads import head
from birl.models.layer_rules import check_layers
from birl.models.paged import Cache, Paged
from birl.models.shape import Shape
from birl.models.slots import body_of, computed_by, slots_of, supported
from birl.models.states import Stretch

BOUND = 1e-3  # nats, between two implementations of a log-prob in float32
# nats, mean over the tokens: trained weights amplify the rounding of single tokens (by 1e-3 in a fine-tuned SmolLM2)
TRAINED = 3e-3
CAUSES = {
    "by its head": "its hidden states or its logits are changed in a way that birl has no rule for",
    "": "its masks say more than what is passed to its attention, or positions are counted where birl cannot see it",
}
ROUNDING = 4.0  # bound for other dtypes: times the error of transformers' own forward


def verify(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Refuse an architecture that birl's forward passes would compute silently wrong: states, logit scaling, biases by
    absolute position, masks that attention does not get. Log-probs of short sequences, packed into one row and one
    after another over pages of the cache, are compared with those of transformers' own forward, which has its own
    attention and masks; of this model, and once for each architecture of a small random one with windows shorter than
    the sequences (`models/twin.py`), which has the tighter bound. With float32 weights; the small one also in `dtype`,
    the run's dtype, which has kernels of its own.

    Raises `BirlError`.
    """
    check_layers(model)
    compare(model, Tree.of(5, (4, 3)), Tree.of(5), trained=True)
    prove(cast(Any, model).config, head(model).weight.device, type(model), dtype)


def prove(config: Any, device: torch.device, kind: type | None = None, dtype: torch.dtype = torch.float32) -> None:
    """The second half of `verify`, by a model's config; the result is cached. `kind`: the model's class, if several
    classes have this config."""
    from birl.models import twin  # imported once for each architecture: the proof is cached

    try:
        small = twin.twin(config, sees=kind is not None and hasattr(kind, "get_image_features"))
    except Exception as error:
        unnamed = "Unrecognized configuration class" in str(error)
        why = "transformers has no text-only class for it" if unnamed else first_line(error)
        raise BirlError(
            f"birl cannot verify {config.model_type}: a small model of its config cannot be built ({why})."
        ) from error
    check_layers(small)
    if kind is not None and type(small) is not kind:
        return
    proof = twin.proved(small, device, dtype)
    if proof.exists():
        return
    trees = Tree.of(21, (14, (9, (3, 6)))), Tree.of(30)
    compare(small.to(device), *trees)
    if dtype != torch.float32:
        compare_rounded(small, *trees, dtype)
    with suppress(OSError):
        proof.parent.mkdir(parents=True, exist_ok=True)
        proof.touch()


class Ways:
    """Log-probs [T, V] of the same short sequences, those of `tree` and `other`, by each forward pass."""

    def __init__(self, model: nn.Module, tree: Tree, other: Tree) -> None:
        self.model, self.tree, self.other = model, tree, other
        self.device = head(model).weight.device
        generator = torch.Generator().manual_seed(0)
        vocab = head(model).weight.shape[0]
        self.ids = torch.randint(0, vocab, (len(tree) + len(other),), generator=generator).to(self.device)
        every = list(ways([tree, other]))
        above = {r.start for _, way in every for r in way[:-1]}
        self.places = [places(way).to(self.device) for node, way in every if node.first not in above]
        self.sequences = [self.ids[p] for p in self.places]

    def alone(self) -> Tensor:
        """By transformers' own forward."""
        with computed_by(self.model, "eager"):
            each = [cast(Any, self.model)(input_ids=s[None], use_cache=False).logits[0].float() for s in self.sequences]
        return torch.cat(each).log_softmax(-1)

    def headed(self) -> Tensor:
        """By birl's head, on the hidden states of transformers' own forward."""
        with computed_by(self.model, "eager"):
            each = [body_of(self.model)(input_ids=s[None], use_cache=False)[0][0] for s in self.sequences]
        return logits(self.model, torch.cat(each)).log_softmax(-1)

    def packed(self) -> Tensor:
        tree, other = self.tree, self.other
        positions = torch.tensor(tree.positions() + other.positions(), device=self.device, dtype=torch.int64)
        hidden = hidden_states(self.model, self.ids, positions, Packed([tree, other], self.device))
        rows = logits(self.model, hidden).log_softmax(-1)
        return torch.cat([rows[p] for p in self.places])

    def paged(self) -> Tensor:
        """Log-probs of the first sequence only."""
        return decoded(self.model, self.sequences[0])

    @property
    def own(self) -> tuple[tuple[str, Callable[[], Tensor]], ...]:
        return ("packed", self.packed), ("over the cache", self.paged)


@torch.no_grad()
def compare(model: nn.Module, tree: Tree, other: Tree, trained: bool = False) -> None:
    """Raise `BirlError` if a log-prob differs by more than `BOUND`, or those of a token by more than `TRAINED` on
    average."""
    bound = TRAINED if trained else BOUND
    kind, ways = type(model).__name__, Ways(model, tree, other)
    with supported(kind):
        slots_of(model)
        expected = ways.alone()
        if expected.isnan().any():
            broken = [name for name, p in model.named_parameters() if not (p.is_meta or p.isfinite().all())]
            why = f"its weights hold NaN or infinity: {broken[0]}" if broken else "look for it in its config.json"
            raise BirlError(f"{kind} computes NaN: {why}.")
        for name, way in (("by its head", ways.headed), *ways.own):
            result = way()
            gaps = (result - expected[: len(result)]).abs()
            gap = (gaps.mean(1) if trained else gaps).max().item()
            if gap <= bound:
                continue
            again = [(way() - result).abs().max().item(), (ways.alone() - expected).abs().max().item()]
            raise BirlError(
                f"{kind} gives other log-probs {name} than alone by transformers' own forward (difference {gap:.2g}, "
                f"allowed {bound}): "
                + (
                    f"{CAUSES.get(name, CAUSES[''])}. birl cannot train this architecture."
                    if not any(again)
                    else f"computed again, the same numbers come out otherwise ({name} by {again[0]:.2g}, alone by "
                    f"{again[1]:.2g}), so this machine or a library computes wrongly. Try again; BIRL_KERNELS=0 leaves "
                    "out birl's own kernels."
                )
            )


@torch.no_grad()
def compare_rounded(model: nn.Module, tree: Tree, other: Tree, dtype: torch.dtype) -> None:
    """`compare` in another dtype (which the model keeps), relative to the rounding error of transformers' own forward,
    as no constant bounds it. Mean absolute differences of each token's log-probs from those of the rounded weights in
    float32; a token may have `ROUNDING` times the largest of transformers'. In mixtures of experts the last bit decides
    routing, so one token in ten is excluded from both. Raises `BirlError`."""
    kind, ways = type(model).__name__, Ways(model, tree, other)
    with supported(kind):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        exact = ways.alone()
        for parameter in model.parameters():  # but not the buffers that rotary angles are computed from
            parameter.data = parameter.data.to(dtype)
        forget(model)
        spared = 0.1 if Shape.of_model(model).sparse_layers else 0.0
        limit = ROUNDING * (ways.alone() - exact).abs().mean(1).quantile(1 - spared).item()
        for name, way in ways.own:
            result = way()
            gaps = (result - exact[: len(result)]).abs().mean(1)
            beyond = ~(gaps <= limit)
            if beyond.float().mean().item() > spared:
                raise BirlError(
                    f"{kind} in {str(dtype).removeprefix('torch.')} gives other log-probs {name} than in float32: "
                    f"{int(beyond.sum())} of {len(gaps)} tokens differ by more than {limit:.2g} on average, which is "
                    f"{ROUNDING:g} times what transformers' own forward loses (the most: {gaps.max().item():.2g}). A "
                    f"kernel for {ways.device.type} is wrong here: take model.dtype=float32, and report it."
                )


def decoded(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs [T, V] of one sequence over the cache: its first two thirds in two chunks, then token by token."""
    device, length = head(model).weight.device, len(ids)
    cache = Cache.make(-(-length // PAGE), slots_of(model), head(model).weight.dtype, device)
    table, rows = [list(reversed(range(len(cache.keys[0]))))], []
    cuts = [0, length // 3, 2 * length // 3, *range(2 * length // 3 + 1, length + 1)]
    for begin, end in pairwise(cuts):
        places = list(range(begin, end))
        layout = Paged.of(cache, table * len(places), [i + 1 for i in places], [len(places)], [0])
        layout.stretches.append(Stretch(0, 0, len(places), begun=begin > 0))
        hidden = hidden_states(model, ids[begin:end], torch.tensor(places, device=device, dtype=torch.int64), layout)
        rows.append(logits(model, hidden))
    return torch.cat(rows).log_softmax(-1)
