"""A frozen base on several ranks, each with a whole copy (`parallel.ddp`) or a shard (`SplitBase`): the rows of each
pass are divided among them.

    rank 0      RankedBase.learn      log-probs of all rows, the loss, and its gradient by the log-probs, as on one rank
    all ranks   Copy.forward          log-probs of the rank's own rows, with the graph for the backward pass
                Copy.backward         gradients of the adapters, summed over the ranks
                Copy.evaluate         what is asked about a prompt, if rank 0 has no whole copy

Only rank 0 has masters and optimizers, and, if it samples itself, a whole copy. The other ranks are sent the rounded
adapters (`AdapterWeights`), once for each content, and the files of pictures. How the rows of one adapter are divided
does not depend on other adapters in the pass.

For a split base FSDP gathers weights within the forward and backward pass of a module: those of a layer within its own,
the head's and the embedding's within those of `_Whole`, which therefore runs the whole pass. Under tensor parallelism a
rank has those rows of B that belong to its rows of W, and those columns of A that belong to its columns (`part`); its
contribution to a layer's output is a summand, and so are its gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from birl.errors import BirlError, first_line
from birl.learner.low_rank_run import OfHidden, SharedBase, backward
from birl.models import vision
from birl.models.device import device_of
from birl.models.heads import head
from birl.models.load import cast
from birl.models.low_rank import AdapterWeights, Factors, RowGroup
from birl.models.slices import fill
from birl.models.target_logprobs import TargetRow
from birl.models.vision import pictures_of
from birl.parallel.crew import RankGroup, stop_at_once
from birl.parallel.ranks import Ranks
from birl.parallel.regions import Regions
from birl.parallel.shard import settle, shard
from birl.parallel.shared import Shared
from birl.parallel.tensor import check, split
from birl.types import Picture

NOTHING = TargetRow(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
KEPT = 2**31  # bytes of adapters that each rank keeps beyond a pass
T = TypeVar("T")
Matrices = Mapping[str, tuple[Tensor, Tensor]]  # A and B of each layer
Work = Sequence[tuple[AdapterWeights | None, Sequence[TargetRow]]]


@dataclass(slots=True)
class Copy:
    """One rank's base and its `adapters` by number; `rows`: log-probs of the current pass."""

    base: SharedBase
    ranks: Ranks
    adapters: dict[int, AdapterWeights] = field(default_factory=dict)
    sums: dict[int, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)  # whole gradients of A and B
    rows: list[Tensor] = field(default_factory=list)
    open: ExitStack = field(default_factory=ExitStack)

    def forward(
        self,
        new: Mapping[int, Matrices],
        kept: Sequence[int],
        files: Mapping[str, bytes],
        wanted: Sequence[int],
        work: Sequence[list[tuple[int, Sequence[TargetRow]]]],
        trained: bool,
    ) -> list[Any]:
        """Return to rank 0 for each rank the log-probs [T, K] of its rows, or an error message. `work`: for each rank,
        adapter numbers (0: none) and rows; `wanted`: adapters of the pass; `kept`: adapters to keep from now on, of
        which `new` are not known yet."""
        self._keep(new, kept)
        (own,) = self.ranks.mine(work)
        result: Any = []
        try:
            result = self._forward(own, wanted, files, trained)
        except Exception as error:
            if self.ranks.sharded:  # the others wait for this one's weights
                raise
            self.close()
            result = f"{type(error).__name__}: {first_line(error)}"
        return self._gathered(result)

    def evaluate(
        self,
        new: Mapping[int, Matrices],
        kept: Sequence[int],
        files: Mapping[str, bytes],
        number: int,
        tokens: Tensor,
        compute: OfHidden[Any],
    ) -> Any:
        """`SharedBase.evaluated` with an adapter (0: none). `compute` is only called by the first share; the others
        contribute their weights."""
        self._keep(new, kept)
        held = self._seen(files)  # noqa: F841  pictures are kept while something refers to them
        if self.ranks.share:
            tokens, compute = NOTHING.tokens, nothing
        return self.base.evaluated(tokens, self.adapters.get(number), compute)

    def _keep(self, new: Mapping[int, Matrices], kept: Sequence[int]) -> None:
        self.adapters = {n: a for n, a in self.adapters.items() if n in kept}
        for number, layers in new.items():
            parts = {name: self.base.part(name, *both) for name, both in layers.items()}
            placed = {n: [x.contiguous().to(self.base.device) for x in both] for n, both in parts.items()}
            factors = {name: Factors(a, b) for name, (a, b) in placed.items()}
            self.adapters[number] = AdapterWeights(number, factors)

    def _seen(self, files: Mapping[str, bytes]) -> list[Picture]:
        pictures = pictures_of(self.base.model)
        held = [] if pictures is None else [pictures.held(Picture.of(data)) for data in files.values()]
        for picture in held:
            assert pictures is not None
            pictures.add(picture)
        return held

    def _forward(self, own: list[tuple[int, Sequence[TargetRow]]], wanted: Sequence[int], files: Mapping[str, bytes],
                 trained: bool) -> Any:  # fmt: skip
        held = self._seen(files)  # noqa: F841  pictures are kept while something refers to them
        for f in (f for adapter in self.adapters.values() for f in adapter.factors.values()):
            f.gradients = None
        self.sums = {n: self._places(self.adapters[n]) for n in wanted if trained}
        idle = not own and self.ranks.sharded  # the others need this one's weights in their passes
        own = [(wanted[0] if wanted else 0, [NOTHING])] if idle else own
        if work := [(self.adapters.get(number), rows) for number, rows in own]:
            self.rows = [p for part in self.open.enter_context(self.base.passed(work, trained)) for p in part]
        result = [] if idle else [p.detach().cpu().numpy() for p in self.rows]
        if not trained:
            self.close()
        return result

    def _places(self, adapter: AdapterWeights) -> dict[str, tuple[Tensor, Tensor]]:
        """For the gradients of a pass: of whole matrices, of which this rank adds to its part."""
        result = {}
        for name, f in adapter.factors.items():
            layer, rank = self.base.layers[name], len(f.a)
            a = torch.zeros(rank, layer.in_features, dtype=torch.float32, device=self.base.device)
            b = torch.zeros(layer.out_features, rank, dtype=torch.float32, device=self.base.device)
            result[name], f.gradients = (a, b), self.base.part(name, a, b)
        return result

    def backward(self, numbers: Sequence[int], grads: Sequence[list[Tensor]]) -> list[Any]:
        """Return for each rank "" or an error message; `sums` are the adapters' gradients, summed over the ranks."""
        (own,) = self.ranks.mine(grads)
        word = ""
        try:
            own = own or [torch.zeros_like(p) for p in self.rows]
            pairs = [(p, g.to(p.device)) for p, g in zip(self.rows, own, strict=True) if p.requires_grad]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
        except Exception as error:
            if self.ranks.sharded:
                raise
            word = f"{type(error).__name__}: {first_line(error)}"
        words = self._gathered(word, everywhere=True)
        for number in () if any(words) else numbers:
            places = [g for each in self.sums[number].values() for g in each]
            flat = torch.cat([g.reshape(-1) for g in places])
            dist.all_reduce(flat)
            for place, total in zip(places, flat.split([g.numel() for g in places]), strict=True):
                place.copy_(total.view_as(place))
        self.close()
        return words

    def close(self) -> None:
        """End the current pass; there is no backward pass after this."""
        self.rows = []
        self.open.close()

    def _gathered(self, value: Any, everywhere: bool = False) -> list[Any]:
        result: list[Any] = [None] * self.ranks.shares
        if everywhere:
            dist.all_gather_object(result, value, group=self.ranks.groups["share"])
        else:
            first = self.ranks.share == 0
            dist.gather_object(value, result if first else None, group=self.ranks.groups["share"], group_dst=0)
        return result


class _Whole(nn.Module):
    """The model as a module whose forward pass is the whole computation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def states(self, compute: Callable[[], T]) -> T:
        return compute()


class SplitBase(SharedBase):
    def __init__(self, model: nn.Module, dtype: torch.dtype, max_tokens: int, ranks: Ranks) -> None:
        """(every rank) `model`: without weights (`models/slices.py`). Raises `BirlError` if it cannot be split."""
        device = device_of(model)
        super().__init__(cast(model, dtype), dtype, max_tokens, split=ranks.grid.tp > 1)
        self.device, self.tp, self.place = device, ranks.grid.tp, ranks.rank % ranks.grid.tp
        self.kinds: dict[str, str] = {}
        if self.tp > 1:
            body: Any = vision.language_model(model) or model.base_model
            known = {id(body.get_submodule(path)): kind for path, kind in check(model, self.tp).items()}
            self.kinds = {name: known.get(id(layer), "colwise") for name, layer in self.layers.items()}
            if apart := next((n for n, kind in self.kinds.items() if kind not in ("colwise", "rowwise")), ""):
                raise BirlError(
                    f"parallel.tp={self.tp}: birl cannot share out adapters of {apart}, which every rank has whole "
                    "or which holds several matrices. Set parallel.tp=1, and parallel.fsdp to split the weights."
                )
            split(model, ranks, Regions(ranks.groups["tp"], sequence=False))
        self.whole = _Whole(model)
        shard(self.whole, model, ranks, dtype)
        fill(model)
        settle(self.whole)

    def part(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of A and B of a layer, as views."""
        if self.tp == 1:
            return a, b
        if self.kinds[name] == "colwise":
            return a, b.chunk(self.tp, 0)[self.place]
        return a.chunk(self.tp, 1)[self.place], b

    def within(self, compute: Callable[[], T]) -> T:
        return self.whole.states(compute)


class RankedBase(SharedBase):
    """Rank 0's view of all copies."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, max_tokens: int, crew: RankGroup, own: SharedBase | None = None
    ) -> None:
        """`own`: rank 0's part of a split base; `model` may then be without weights, if nothing is sampled with it."""
        super().__init__(model, dtype, max_tokens)
        self.crew, self.copy = crew, Copy(own or self, crew.ranks)
        if own is not None:
            self.alike, self.layers, self.device = own.alike, own.layers, own.device
        self.known: list[int] = []  # adapters that the other ranks have

    def learn(self, work: Work, loss: Callable[[int, Sequence[Tensor]], Tensor] | None) -> list[list[Tensor]]:
        """`SharedBase.learn`, distributed. If a rank is lost the process ends before anything is answered."""
        adapters = {a.number: a for a, _ in work if a is not None}
        given = self._given(adapters, [row.tokens for _, rows in work for row in rows])
        parts = [shared_out(rows, self.crew.ranks.shares) for _, rows in work]
        numbers = [0 if a is None else a.number for a, _ in work]
        each = Shared(
            [(n, rows[part[rank]]) for n, (_, rows), part in zip(numbers, work, parts, strict=True) if rows[part[rank]]]
            for rank in range(self.crew.ranks.shares)
        )
        answers = self._call(Copy.forward, *given, list(adapters), each, loss is not None)
        if words := [f for f in answers if isinstance(f, str)]:
            self._call(Copy.close)
            raise RuntimeError(words[0])
        queues = [iter(torch.from_numpy(p) for p in f) for f in answers]
        rows = [
            [next(queues[rank]) for rank, own in enumerate(part) for _ in own_rows[own]]
            for (_, own_rows), part in zip(work, parts, strict=True)
        ]
        if loss is not None:
            self._learn(adapters, parts, rows, loss)
        return rows

    def _learn(self, adapters: Mapping[int, AdapterWeights], parts: Sequence[Sequence[slice]],
               rows: Sequence[Sequence[Tensor]], loss: Callable[[int, Sequence[Tensor]], Tensor]) -> None:  # fmt: skip
        leaves = [[p.clone().requires_grad_() for p in own] for own in rows]
        try:
            with torch.enable_grad():
                backward(sum(loss(number, own) for number, own in enumerate(leaves)))
        except BaseException:
            self._call(Copy.close)
            raise
        grads = Shared(
            [g if (g := p.grad) is not None else torch.zeros_like(p)
             for own, part in zip(leaves, parts, strict=True) for p in own[part[rank]]]
            for rank in range(self.crew.ranks.shares)
        )  # fmt: skip
        if words := [w for w in self._call(Copy.backward, list(adapters), grads) if w]:
            raise RuntimeError(words[0])
        for number, adapter in adapters.items():
            for name, f in adapter.factors.items():
                for place, added in zip(f.gradients or (), self.copy.sums[number][name], strict=False):
                    place += added

    def evaluated(self, tokens: Tensor, adapter: AdapterWeights | None, compute: OfHidden[T]) -> T:
        if not head(self.model).weight.is_meta:
            return super().evaluated(tokens, adapter, compute)
        adapters = {} if adapter is None else {adapter.number: adapter}
        return self._call(Copy.evaluate, *self._given(adapters, [tokens]), next(iter(adapters), 0), tokens, compute)

    def _given(self, adapters: Mapping[int, AdapterWeights], rows: Iterable[Tensor]) -> tuple[Any, ...]:
        """What the other ranks lack for a pass: `new`, `kept` and `files` of `Copy.forward`."""
        new = {n: sent(a) for n, a in adapters.items() if n not in self.known}
        self.known = [n for n in self.known if n not in adapters] + list(adapters)
        sizes = {n: a.nbytes for n, a in self.copy.adapters.items()}
        while len(self.known) > len(adapters) and sum(sizes.get(n, 0) for n in self.known) > KEPT:
            self.known.pop(0)
        pictures = pictures_of(self.model)
        used = {} if pictures is None else {d: f for row in rows for d, f in pictures.used(row.tolist()).items()}
        return new, list(self.known), used

    def _call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.crew.call(self.copy, verb, *arguments)
        except BaseException as error:
            self.crew.failed(str(error), not isinstance(error, BirlError) or self.crew.told())
            ended(error)


def nothing(model: nn.Module, hidden: Tensor, groups: Sequence[RowGroup]) -> None:
    pass


def ended(error: BaseException) -> NoReturn:
    stop_at_once(f"a rank of the learner is gone, and nothing was answered since: {error}")
    raise error


def sent(adapter: AdapterWeights) -> dict[str, tuple[Tensor, Tensor]]:
    """Copy to CPU memory: a tensor pickled on a GPU is restored on the GPU of that number, which is another rank's."""
    return {name: (f.a.cpu(), f.b.cpu()) for name, f in adapter.factors.items()}


def shared_out(rows: Sequence[TargetRow], ranks: int) -> list[slice]:
    """Slices of consecutive rows, one for each rank, with about equally many tokens."""
    ends = list(accumulate(len(row.tokens) for row in rows))
    bounds = [sum(end <= ends[-1] * rank / ranks for end in ends) for rank in range(ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
