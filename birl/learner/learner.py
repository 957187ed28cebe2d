"""The four operations of training: forward, forward_backward, optim_step, state. Every training loop uses them.

Not here: losses (functions that are passed in), the source of batches, when to save.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birl.data.pack import Batch
from birl.errors import BirlError
from birl.foreign import described
from birl.learner.lora import Adapters, Lora
from birl.learner.optimizer import MasterWeights, ShardedMasterWeights, adamw
from birl.learner.outputs import Compared, Outputs, recompute
from birl.learner.rounding import dither
from birl.models.device import device_of
from birl.models.forward import forget
from birl.models.fused_decoder import apart
from birl.models.heads import head, score_head
from birl.models.load import cast
from birl.models.routing import Seen, balance, load_counts, routing_for
from birl.models.slices import fill
from birl.models.vision import still
from birl.parallel.layout import drop_gathered
from birl.parallel.ranks import Ranks, global_norm, sum_gradients
from birl.waits import alive

if TYPE_CHECKING:  # loaded by the runs that have them
    from birl.learner.distillation import Average
    from birl.learner.policies import Policies

#: logp [N] (or scores), entropy [N], batch -> scalar loss, and figures to report: name -> [N], or [pairs]
Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
#: a micro-batch -> a function that compares its next-token distributions with a teacher's
Teacher = Callable[[Batch], Compared]

BALANCE = "router/balance"


@dataclass(slots=True)
class Stats:
    """Figures of one training step, summed over its micro-batches. Means are over the units of the loss:
    trained tokens, or pairs of answers."""

    loss: float = 0.0
    count: int = 0  # trained tokens, or pairs
    computed: int = 0  # packed tokens that went through the model
    updates: int = 0  # optimizer steps
    skipped: int = 0  # parts of the batch without any gradient
    nonfinite: int = 0  # optimizer steps that were left out because the gradient was not finite
    grad_norm: float = 0.0  # of the last one, before clipping
    first_gap: float = math.nan  # mean |engine log-prob - learner log-prob| before the weights moved

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)  # figures that are means already
    of: "dict[str, Stats]" = field(default_factory=dict)  # each policy's own, where a run has several
    on_device: list[tuple[tuple[str, ...], tuple[str, ...], Tensor]] = field(default_factory=list)  # not yet read

    def add(self, loss: Tensor, figures: dict[str, Tensor], computed: int, parts: Mapping[str, Tensor] = {}) -> None:
        """Add one micro-batch, with its `parts` [] of figures in `other`. Does not wait for the device: the figures
        are included by the next `read`."""
        lowest = loss.new_full((), float("-inf"), dtype=torch.float64)
        numbers = [loss.double()]
        for values in figures.values():
            numbers += [values.sum(dtype=torch.float64), values.max().double() if len(values) else lowest]
        numbers += [part.double() for part in parts.values()]
        self.on_device.append((tuple(figures), tuple(parts), torch.stack(numbers).detach()))
        self.computed += computed
        self.count += len(next(iter(figures.values()), ()))

    def read(self) -> None:
        """Read the figures of all micro-batches, waiting for the device once."""
        waiting, self.on_device = self.on_device, []
        numbers = iter(torch.cat([each for _, _, each in waiting]).tolist() if waiting else ())
        for names, parts, _ in waiting:
            self.loss += next(numbers)
            for name in names:
                self.sums[name] = self.sums.get(name, 0.0) + next(numbers)
                self.maxima[name] = max(self.maxima.get(name, float("-inf")), next(numbers))
            for name in parts:
                self.other[name] = self.other.get(name, 0.0) + next(numbers)

    def merge(self, other: "Stats", ranks: Ranks) -> None:
        """Add the figures of `other`, summed over `ranks`, of which each has its own micro-batches."""
        other.read()
        counted = ranks.total({"loss": other.loss, "count": other.count, "computed": other.computed})
        self.loss += counted["loss"]
        self.count += int(counted["count"])
        self.computed += int(counted["computed"])
        for name, value in ranks.total(other.sums).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in ranks.total(other.maxima, largest=True).items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), value)

    def take(self, policy: str, figures: "Stats") -> None:
        """Add the figures, already of all ranks, of one policy's micro-batches."""
        for total in (self, self.of.setdefault(policy, Stats())):
            total.merge(figures, Ranks())
        self.other |= figures.other

    def mean(self, name: str) -> float:
        """Mean of a figure; NaN if nothing was trained: 0 would look like a collapse."""
        return self.sums.get(name, 0.0) / self.count if self.count else math.nan


class Learner:
    """A model, and (unless it is frozen) its optimizer. Weights are float32; `dtype` is the compute type.

    `version` counts optimizer steps and identifies the weights. `rounded` counts the weights of this rank that were not
    numbers of `dtype`, and are trained from the nearest one (`rounding.py`). With `lora` low-rank matrices are trained
    instead of the weights, and the model's parameters hold the merged weights (`lora.py`); if it names policies, each
    micro-batch belongs to one of them, and a step updates those with micro-batches (`policies.py`).

    With `ranks` there is one learner in each process, and all must call the same methods with the same arguments. A
    micro-batch is computed by one share of the ranks: `each`, `learn` and `survey` divide a step's micro-batches. If
    the model is sharded, it may be passed without weights (`models/slices.py`). With `teacher` losses find the
    divergence from it in their batch.
    """

    average: "Average | None" = None  # of its weights, which is its teacher

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.bfloat16,
        temperature: float = 1.0,
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        gradient_checkpointing: bool = False,
        trainable: bool = True,
        offload: bool = False,
        lora: Lora | None = None,
        ranks: Ranks | None = None,
        router_aux_coef: float = 0.0,
        router_replay: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        """`router_aux_coef`: weight of the balance of a mixture-of-experts model's experts (`routing.balance`) added
        to every loss. `router_replay`: tokens take the routes in their batch."""
        self.model, self.teacher, self.policies, self.dtype = model, teacher, None, dtype
        self.device = device_of(model)  # compute device: with `offload` FSDP keeps the shards in CPU memory
        self.ranks = ranks = ranks or Ranks()
        self.max_grad_norm, self.router_aux_coef, self.version, self.rounded = max_grad_norm, router_aux_coef, 0, 0
        self.replays = routing_for(model) if router_replay else None
        self.watched = routing_for(model) if router_aux_coef > 0 else None
        self.outputs = Outputs(model, temperature, gradient_checkpointing, ranks)
        model.requires_grad_(trainable)
        # nothing is padded here: the padding token, often the one that ends an answer, has a gradient like any other
        model.get_input_embeddings().padding_idx = None  # pyright: ignore
        if score_head(model) is not None and head(model).weight is not model.get_input_embeddings().weight:  # pyright: ignore
            head(model).requires_grad_(False)  # nothing reads it
        model.eval()  # no dropout: the engine and the learner must see one and the same distribution
        if not trainable:
            cast(model, dtype)
            if ranks.sharded:
                self._shard(dtype, False)
            return
        if gradient_checkpointing:
            recompute(model)
        if ranks.sharded:
            from birl.learner.split_lora import SplitAdapters, prepare

            origin = None if lora is None else prepare(model, lora, dtype, ranks)
            summands = self._shard(dtype, offload)
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if lora is None or origin is None:
                self.masters = ShardedMasterWeights(parameters, summands, ranks.groups["tp"])
            else:
                more = {"summands": summands, "group": ranks.groups["tp"]}
                self.masters = SplitAdapters(model, lora, origin, parameters, dtype, offload, **more)
        else:
            self.masters, self.policies = masters_of(model, lora, dtype, offload)
            cast(model, dtype)  # what is frozen, too
        if isinstance(self.masters, MasterWeights | ShardedMasterWeights) and dtype != torch.float32:
            self.rounded = dither(self.masters, dtype)
        rates = {"kind": optimizer, "betas": betas, "eps": eps, "weight_decay": weight_decay, "still": still(model)}
        self.optimizer = adamw(self.masters, model, **rates)

    @property
    def rounded_share(self) -> float:
        """`rounded` as a share of the trained weights; those of a checkpoint, which are read later, are not rounded."""
        return self.rounded / max(1, sum(t.numel() for t in self.masters.tensors.values())) if self.rounded else 0.0

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """[N] float32: log-probs of the trained tokens under the sampling temperature; with a score head, the
        score of the state that each of them is predicted from."""
        return self._passed(batch.to(self.device))[0]

    def forward_backward(
        self, batch: Batch, loss: Loss, stats: Stats, chosen: Tensor | None = None, wait: bool = True
    ) -> None:
        """Accumulate this micro-batch's gradient, and add its figures to `stats`. `chosen` [layers, experts]: how often
        each expert is chosen in the whole step, for `router_aux_coef`. Without `wait` the figures are available after
        `Stats.read`."""
        batch = batch.to(self.device)
        with self._routed(batch):  # the backward pass may compute layers again
            logp, entropy, batch, seen = self._passed(batch, self.teacher)
            value, figures = loss(logp, entropy, batch)
            parts = {} if chosen is None else {BALANCE: balance(seen, batch.copies, chosen)}
            total = value if chosen is None else value + self.router_aux_coef * parts[BALANCE]
            try:
                total.backward()
            except Exception as error:
                if (own := getattr(value, "own", "")) and not isinstance(error, torch.OutOfMemoryError):
                    raise BirlError(f"{own}: the backward pass failed: {described(error)}") from error
                raise
        stats.add(value, figures, len(batch.tokens), parts)
        if wait:
            stats.read()

    def learn(self, work: Sequence[tuple[Batch, Loss]], stats: Stats) -> None:
        """Accumulate the gradients of a step's micro-batches, divided among ranks, and add all figures to `stats`."""
        own = Stats()
        chosen = self._chosen([batch for batch, _ in work]) if self.router_aux_coef > 0 else None
        for batch, loss in self.ranks.mine(work):
            self.forward_backward(batch, loss, own, chosen, False)
            alive()
        stats.merge(own, self.ranks)
        if chosen is not None:
            stats.other |= self.ranks.total(own.other)

    @torch.no_grad()
    def _chosen(self, batches: Sequence[Batch]) -> Tensor:
        """How often each expert is chosen in a step, [layers, experts] float64. This takes an additional forward pass
        over its micro-batches, so that the balance is of the whole step, regardless of packing and ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self.ranks.mine(batches):
            batch = batch.to(self.device)
            total = total + load_counts(self._passed(batch)[3], batch.copies)
            alive()
        if self.ranks.shares > 1:
            torch.distributed.all_reduce(total, group=self.ranks.groups["share"])
        return total

    def survey(self, work: Sequence[tuple[Batch, Loss]], stats: Stats) -> None:
        """Add the figures that `learn` would give, without gradient."""
        own = Stats()
        for batch, loss in self.ranks.mine(work):
            self.measure(batch, loss, own)
            alive()
        stats.merge(own, self.ranks)

    @torch.no_grad()
    def look(self, batch: Batch) -> Tensor:
        """Log-probs and entropies of the trained tokens, [2, N] float32."""
        return torch.stack(self._passed(batch.to(self.device))[:2])

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Values of the critic on this backbone for the state before each trained token, [N] float32."""
        predicted = self._passed(batch.to(self.device))[2].predicted
        assert predicted is not None, "this learner has no critic on its backbone"
        return predicted

    @torch.no_grad()
    def measure(self, batch: Batch, loss: Loss, stats: Stats) -> None:
        """Add the figures that `forward_backward` would give, without gradient."""
        batch = batch.to(self.device)
        value, figures = loss(*self._passed(batch, self.teacher)[:3])
        stats.add(value, figures, len(batch.tokens))

    def optim_step(self, lr: float) -> float:
        """Take one optimizer step at rate `lr`; returns the global gradient norm before clipping. Clears the
        gradient."""
        drop_gathered(self.outputs)
        self.masters.gather()
        norm = self._clipped() if self.policies is None else self.policies.clip(self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        size = norm.item()  # waits for the device: whether the step is taken depends on it
        if math.isfinite(size):
            self.optimizer.step()
            self.masters.publish()
            if self.average is not None:
                self.average.follow(self)
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return size

    def _clipped(self) -> Tensor:
        """Clip the gradient; returns its norm before clipping."""
        tensors = list(self.masters.tensors.values())
        for tensor in tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        if self.ranks.grid.ddp > 1:
            sum_gradients(tensors, self.ranks.groups["ddp"], self.device)
        norm = global_norm(self.masters, self.ranks)
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(tensors, self.max_grad_norm, norm)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold, by name, as the live tensors: float32 weights, persistent buffers,
        optimizer state. With LoRA the matrices instead of the weights, and the digest of their base."""
        drop_gathered(self.outputs)
        result = dict(self.masters.marks)
        for name, master in self.masters.tensors.items():
            result[f"model.{name}"] = self.masters.whole(name, master.data)
            for key, value in self.optimizer.state[master].items():
                result[f"optimizer.{name}.{key}"] = self.masters.whole(name, value)
        parameters = {id(p) for p in self.model.parameters()}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in parameters:
                result[f"model.{name}"] = value
        return result | ({} if self.average is None else self.average.tensors())

    def weights(self) -> dict[str, Tensor]:
        """The float32 weights only, by the model's names."""
        return self.masters.weights()

    def loaded(self, version: int) -> None:
        """Call after new values were written into `tensors()`. Raises `BirlError` if they belong to another base."""
        drop_gathered(self.outputs)
        self.masters.loaded()
        if self.average is not None:
            self.average.teacher.loaded(version)
        self.version = version

    def _passed(self, batch: Batch, teacher: Teacher | None = None) -> tuple[Tensor, Tensor, Batch, Seen]:
        """Log-probs [N] and entropies [N]; with a score head, scores [N] and zeros. The returned batch has
        the values of a critic on the same backbone and the divergence from a teacher. Last, the watched routers."""
        compared = None if teacher is None else teacher(batch)
        watching = nullcontext({}) if self.watched is None else self.watched.watching()
        with self._routed(batch), watching as seen:
            logp, entropy, columns = self.outputs(batch, compared)
        return logp, entropy, replace(batch, **columns) if columns else batch, seen

    def _routed(self, batch: Batch) -> AbstractContextManager[None]:
        if self.policies is not None:
            return self.policies.active(batch)
        return nullcontext() if self.replays is None else self.replays.replaying(batch.routes)

    def _shard(self, dtype: torch.dtype, offload: bool) -> list[str]:
        """Shard the model. Returns the names of parameters whose gradients must be summed over the ranks of tp."""
        from birl.parallel.regions import Regions
        from birl.parallel.shard import settle, shard
        from birl.parallel.tensor import split

        forget(self.model)
        ways, summands = self.ranks.grid.tp, list[str]()
        if ways > 1:
            regions = Regions(self.ranks.groups["tp"], self.ranks.grid.sequence)
            apart(self.model, ways, regions.enter, regions.end)
            summands = split(self.model, self.ranks, regions)
        else:
            apart(self.model, ways)
        shard(self.outputs, self.model, self.ranks, dtype, offload=offload)
        if fill(self.model, offload):
            settle(self.outputs)
        return summands


def masters_of(
    model: nn.Module, lora: Lora | None, dtype: torch.dtype, offload: bool
) -> "tuple[MasterWeights | Adapters | Policies, Policies | None]":
    """Return the masters of a model that is not sharded, and these again if they are several policies."""
    if lora is None:
        return MasterWeights(model, dtype, offload), None
    if not lora.policies:
        return Adapters(model, lora, dtype, offload), None
    from birl.learner.policies import Policies

    policies = Policies(model, lora, dtype)
    return policies, policies
