"""A LoRA adapter that is trained on a frozen base: its masters, gradients and optimizer.

Many adapters share one base and one pass (`SharedBase.learn`); the results of a run depend on its own requests only.
A and B are float32 masters; passes compute with their rounded copy, which is renewed after each step.
Shapes: for a layer [N, K]: A [r, K], B [N, r].
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from birl.data.trees import Tree
from birl.errors import BirlError
from birl.learner.lora import UNCALLED, Lora, first_a
from birl.models import fused_decoder, vision
from birl.models.attention import Packed
from birl.models.decoder import decoder_for
from birl.models.forward import hidden_states
from birl.models.heads import HEADS, after_head, head
from birl.models.low_rank import HEAD, AdapterWeights, Factors, RowGroup, adapted, hook
from birl.models.target_logprobs import TargetRow, pack_rows, target_logprobs
from birl.models.vision import ATTENTION
from birl.parallel.layout import gathered_for

SEEING = {"visual", "vision_tower", "vision_model", "multi_modal_projector"}  # modules without factors
ALPHA = 32.0  # of every adapter, as in the service with this API: the scale is 32 / rank
NUMBERS = count(1)  # numbers of adapter contents in this process
T = TypeVar("T")
OfHidden = Callable[[nn.Module, Tensor, list[RowGroup]], T]


class BrokenPass(RuntimeError):
    """A backward pass failed. The collected gradients of its adapters are dropped, as it may have added a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankConfig:
    """Rank, seed of A, and the parts of the model with LoRA factors."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Hyperparameters of an AdamW step with decoupled weight decay. `clip`: largest norm of the gradient, 0: none."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0


class LowRankMasters:
    """A and B of some layers as float32 masters, on the layers' devices, and `weights`, their rounded copy that passes
    compute with."""

    def __init__(self, layers: Mapping[str, nn.Linear], *, rank: int, seed: int, scale: float, dtype: torch.dtype):
        self.scale, self.dtype, self.names = scale, dtype, list(layers)
        random = torch.Generator().manual_seed(seed)
        self.masters: dict[str, Tensor] = {}
        for name, layer in layers.items():
            device, lora = layer.weight.device, Lora(rank=rank)
            first_b = torch.zeros(layer.out_features, rank, dtype=torch.float32, device=device)
            self.masters[f"{name}.lora_A"] = first_a(lora, layer.in_features, random).to(device).requires_grad_()
            self.masters[f"{name}.lora_B"] = first_b.requires_grad_()
        self.round()

    def round(self) -> None:
        """Renew `weights` after the masters have changed."""
        factors = {}
        for name in self.names:
            a, b = (self.masters[f"{name}.lora_{key}"].detach() for key in "AB")
            factors[name] = Factors.of(a, b, self.scale, self.dtype)
        self.weights = AdapterWeights(next(NUMBERS), factors)

    @torch.no_grad()
    def copy(self, other: "LowRankMasters") -> None:
        """Copy the masters of another one with the same layers and rank."""
        for name, master in self.masters.items():
            master.copy_(other.masters[name])
        self.round()

    def collect(self) -> None:
        """Allocate the gradients of a new step."""
        for f in self.weights.factors.values():
            if f.gradients is None:
                f.gradients = torch.zeros_like(f.a, dtype=torch.float32), torch.zeros_like(f.b, dtype=torch.float32)

    def gather(self) -> None:
        """Move collected gradients to the masters; layers without any get none."""
        for name, f in self.weights.factors.items():
            if f.gradients is not None:
                a, b = self.masters[f"{name}.lora_A"], self.masters[f"{name}.lora_B"]
                a.grad, b.grad = f.gradients[0][: len(a)].clone(), f.gradients[1][:, : b.shape[1]] * self.scale
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for f in self.weights.factors.values():
            f.gradients = None


class LowRankRun(LowRankMasters):
    """One adapter in training. `state` holds all of it; everything else is derived."""

    def __init__(self, config: LowRankConfig, layers: Mapping[str, nn.Linear], dtype: torch.dtype) -> None:
        super().__init__(layers, rank=config.rank, seed=config.seed, scale=ALPHA / config.rank, dtype=dtype)
        self.config = config
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=0.0, fused=True)
        self.steps = 0

    def gradients(self) -> dict[str, Tensor]:
        """Gradients collected since the last step, by name."""
        result = {}
        for name, f in self.weights.factors.items():
            if f.gradients is not None:
                result[f"gradient.{name}.A"], result[f"gradient.{name}.B"] = f.gradients
        return result

    def load_gradients(self, state: Mapping[str, Tensor]) -> None:
        for name, f in self.weights.factors.items():
            if f"gradient.{name}.A" in state:
                both = (state[f"gradient.{name}.{key}"].to(f.a.device, copy=True) for key in "AB")
                f.gradients = next(both), next(both)

    @torch.no_grad()
    def step(self, how: AdamStep) -> float:
        """Take one optimizer step; returns the gradient's norm before clipping. The gradient is dropped afterwards.
        Raises `BirlError` if it is not finite; then nothing else has changed."""
        self.gather()
        masters = list(self.masters.values())
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        try:
            if not norm.isfinite():
                raise BirlError(
                    f"The gradient is not finite (its norm is {norm.item()}): the step was left out, and the gradient "
                    "dropped. Look at the advantages, weights and log-probs that were sent, or lower the learning rate."
                )
            if how.clip > 0:
                torch.nn.utils.clip_grads_with_norm_(masters, how.clip, norm)
            for group in self.optimizer.param_groups:
                group |= {"lr": how.learning_rate, "betas": (how.beta1, how.beta2), "eps": how.eps}
                group["weight_decay"] = how.weight_decay
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.round()
        return norm.item()

    def state(self, optimizer: bool = True) -> dict[str, Tensor]:
        """Masters and, after a first step, AdamW's moments, by name."""
        result = {name: master.detach() for name, master in self.masters.items()}
        if optimizer:
            for name, master in self.masters.items():
                for key, value in self.optimizer.state[master].items():
                    result[f"optimizer.{name}.{key}"] = value.reshape(-1) if value.ndim == 0 else value
        return result

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], steps: int = 0) -> None:
        """Load a result of `state`. Raises `BirlError` for a missing name, another shape, or a non-finite value."""
        for name, master in self.masters.items():
            value = state.get(name)
            if value is None or value.shape != master.shape or not value.isfinite().all():
                have = "is missing" if value is None else f"has the shape {list(value.shape)}, or is not finite"
                raise BirlError(f"{name} of the checkpoint {have}; this adapter's has {list(master.shape)}.")
        self.optimizer.state.clear()
        for name, master in self.masters.items():
            master.copy_(state[name])
            moments = {key: state.get(f"optimizer.{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(value is not None for value in moments.values()):
                kept = {k: v.to(master.device, copy=True) for k, v in moments.items() if v is not None}
                kept["step"] = kept["step"].reshape(())
                self.optimizer.state[master] = kept
        self.steps = steps
        self.round()


class SharedBase:
    """A frozen base model with passes for rows of different adapters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, max_tokens: int = 4096, split: bool = False) -> None:
        """`max_tokens`: limit of one pass. `split`: layers will be split over ranks. Raises `BirlError` for a model
        that scales or caps its logits."""
        if after_head(model) is not None:
            raise BirlError(f"{type(model).__name__} scales or caps its logits, which shared adapters do not support.")
        self.model, self.dtype, self.max_tokens = model.requires_grad_(False), dtype, max_tokens
        model.eval()
        self.layers = linear_layers(model)
        self.device = head(model).weight.device
        decoder = decoder_for(model)
        self.alike = decoder is not None  # rows have the same bits in any pass
        if decoder is None:
            fused_decoder.MADE[model] = None  # transformers' own layers, which hooks reach
            hook(model, {n: m for n, m in self.layers.items() if n != HEAD}, split)

    def run(self, config: LowRankConfig) -> LowRankRun:
        return LowRankRun(config, self.chosen(config), self.dtype)

    def chosen(self, config: LowRankConfig) -> dict[str, nn.Linear]:
        """The layers with LoRA factors."""
        wanted = {"attention": config.attention, "mlp": config.mlp, "unembed": config.unembed}
        result = {name: m for name, m in self.layers.items() if wanted[part_of(name)]}
        if not result:
            raise BirlError("An adapter needs at least one of train_attn, train_mlp and train_unembed.")
        return result

    @torch.no_grad()
    def evaluated(self, tokens: Tensor, adapter: AdapterWeights | None, compute: OfHidden[T]) -> T:
        """compute(model, hidden states [T, H], their row groups) of one sequence [T]."""
        groups = [] if adapter is None else [RowGroup(0, len(tokens), adapter)]

        def whole() -> T:
            positions = torch.arange(len(tokens), dtype=torch.int64)
            hidden = self._hidden(tokens, positions, [Tree.of(len(tokens))])
            return gathered_for(head(self.model), lambda x: compute(self.model, x, groups), hidden)

        with adapted(self.model, groups):
            return self.within(whole)

    def learn(
        self,
        work: Sequence[tuple[AdapterWeights | None, Sequence[TargetRow]]],
        loss: Callable[[int, Sequence[Tensor]], Tensor] | None,
    ) -> list[list[Tensor]]:
        """One pass for several adapters with their sequences. Returns the log-probs of the targets, [T, K] for each
        sequence. With `loss` (index into `work`, log-probs of its sequences with gradient -> loss) the gradients are
        added to those that the adapters collect."""
        with self.passed(work, trained=loss is not None) as rows:
            if loss is not None:
                total = sum(loss(number, own) for number, own in enumerate(rows))
                try:
                    backward(total)
                except Exception as error:
                    for f in (f for adapter, _ in work if adapter for f in adapter.factors.values()):
                        f.gradients = None
                    raise BrokenPass(f"the backward pass failed: {type(error).__name__}: {error}") from error
        return [[p.detach() for p in own] for own in rows]

    @contextmanager
    def passed(
        self, work: Sequence[tuple[AdapterWeights | None, Sequence[TargetRow]]], trained: bool
    ) -> Iterator[list[list[Tensor]]]:
        """Context with the log-probs; a backward pass must run within it."""
        packed = [pack_rows(rows) for _, rows in work]
        starts = [0, *accumulate(len(p.tokens) for p in packed)]
        groups = [
            RowGroup(start, stop, adapter)
            for (adapter, _), start, stop in zip(work, starts, starts[1:], strict=False)
            if adapter is not None
        ]
        rows = [row for _, own in work for row in own]
        width = max(row.targets.shape[1] for row in rows)
        targets = torch.cat([pad(row.targets, (0, width - row.targets.shape[1])) for row in rows])
        places = torch.cat([at + start for p, start in zip(packed, starts, strict=False) for at in p.places])
        asked, where = distinct(torch.cat([places[:, None], targets], 1))  # in order of places
        own = asked[:, 0].contiguous()
        bounds = [torch.searchsorted(own, torch.tensor((g.start, g.stop), dtype=torch.int64)).tolist() for g in groups]
        at_head = [RowGroup(low, high, g.adapter) for (low, high), g in zip(bounds, groups, strict=True)]

        def compute() -> Tensor:
            tokens, positions = (torch.cat(x) for x in zip(*((p.tokens, p.positions) for p in packed), strict=True))
            hidden = self._hidden(tokens, positions, [tree for p in packed for tree in p.trees])[own.to(self.device)]
            wanted = asked[:, 1:].contiguous().to(self.device)
            return gathered_for(head(self.model), lambda x: target_logprobs(self.model, x, wanted, at_head), hidden)

        with torch.set_grad_enabled(trained), adapted(self.model, groups, trained=trained):
            logp = self.within(compute)
            each = logp[where.to(self.device)].split([len(row.tokens) for row in rows])
            pieces = iter([p[:, : row.targets.shape[1]] for p, row in zip(each, rows, strict=True)])
            yield [[next(pieces) for _ in sequences] for _, sequences in work]

    def within(self, compute: Callable[[], T]) -> T:
        """What is computed where the weights are there, with a gradient if it has one."""
        return compute()

    def part(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank computes with of A and B of a layer."""
        return a, b

    def _hidden(self, tokens: Tensor, positions: Tensor, trees: list[Tree]) -> Tensor:
        row = vision.row(self.model, tokens.to(self.device), positions.to(self.device), trees)
        return hidden_states(self.model, *row[:2], Packed(trees, self.device), row[2])


def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows of [N, C] integers from 0 to 2^31, sorted, and for each row the index of its distinct one. As
    `torch.unique(dim=0)`, whose comparisons take fifty times as long."""
    where = rows[:, 0]
    for column in rows.T[1:]:
        where = (where << 32 | column).unique(return_inverse=True)[1]
    result = rows.new_empty(int(where.max()) + 1, rows.shape[1])
    result[where] = rows
    return result, where


def backward(total: Tensor | int) -> None:
    """Backward pass from a sum of losses; nothing if none of them has a gradient."""
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers of the language model by name, in the model's order; the head is last, as `HEAD`."""
    output = head(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in HEADS and m is not output}
    layers = {n: m for n, m in layers.items() if n.rpartition(".")[2] not in UNCALLED and 0 not in m.weight.shape}
    seeing = {n for n in layers if not SEEING.isdisjoint(n.split("."))}
    seeing |= {name.rpartition(".")[0] for name in vision.tower(model)}  # their rows are patches
    return {n: m for n, m in layers.items() if n not in seeing} | {HEAD: output}


def part_of(name: str) -> str:
    """Part of the model that a layer belongs to: attention | mlp | unembed."""
    words = name.split(".")
    if name == HEAD:
        return "unembed"
    return "attention" if any(w in ATTENTION for w in words) else "mlp"


def parts_bytes(config: LowRankConfig, layers: Mapping[str, nn.Linear], dtype: torch.dtype) -> int:
    """Bytes of an adapter in training: masters, two moments, gradients, and the rounded copy."""
    numbers = sum(config.rank * (m.in_features + m.out_features) for m in layers.values())
    padded = sum(math.ceil(config.rank / 32) * 32 * (m.in_features + m.out_features) for m in layers.values())
    return 12 * numbers + (4 + dtype.itemsize * 5) * padded
