"""LoRA on weights that are split over ranks (`parallel/tensor.py`, FSDP): the algebra of `lora.py` on parts.

A rank has a block of a weight W [N, K], some rows and some columns, and the rows of B and of the magnitudes and the
columns of A that belong to it. So it merges its block locally: W + s B A. It has one summand of the gradients:

    dA [R, K]    summed over the ranks that have other rows of W
    dB [N, R]    summed over the ranks that have other columns; likewise the magnitude's, and squares of row lengths

A checkpoint has the whole A, B and magnitudes, with the same names as on one rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from birl.learner.lora import Adapter, Lora, Origin, Total, digest, first_a, kept, lengths, targets
from birl.learner.optimizer import Masters, ShardedMasterWeights
from birl.learner.rounding import dither_merges
from birl.models.heads import HEADS, score_head
from birl.models.slots import slots_of
from birl.parallel.layout import Layout, local
from birl.parallel.ranks import Ranks, sum_gradients

ROWS, COLUMNS = 0, 1


def prepare(model: nn.Module, lora: Lora, dtype: torch.dtype, ranks: Ranks) -> Origin:
    """Prepare a model before its split: trained weights stay float32, in which FSDP sums gradients; others are cast."""
    slots_of(model)  # looks at a forward pass, for which all weights must have one type
    origin = Origin(ranks.told(digest(model) if ranks.rank == 0 else b""), lora.alpha)
    model.requires_grad_(False)
    for name in targets(model, lora.targets):
        model.get_submodule(name).weight.requires_grad_(True)  # pyright: ignore
    for name in HEADS:
        if head := score_head(model, name):
            head.requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return origin


class SplitAdapters(Masters):
    """This rank's parts of A, B and magnitudes."""

    def __init__(
        self,
        model: nn.Module,
        lora: Lora,
        origin: Origin,
        parameters: dict[str, Any],
        dtype: torch.dtype,
        offload: bool = False,
        summands: Sequence[str] = (),
        group: Any = None,
    ) -> None:
        """`parameters`: trained DTensors by name: the heads' weights and the targets of `lora`. `summands`: parameters
        that are replicated over `group` while each rank has a summand of the gradient."""
        self.summands, self.group = set(summands), group
        self.model, self.origin, self.marks = model, origin, origin.marks
        self.heads = ShardedMasterWeights({name: p for name, p in parameters.items() if name.split(".")[0] in HEADS})
        random = torch.Generator().manual_seed(lora.seed)
        self.adapters: dict[str, Adapter] = {}
        self.layouts: dict[str, Layout] = {}
        for name in targets(model, lora.targets):
            layout = Layout.of(parameters[f"{name}.weight"])
            rows, width = layout.shape
            layouts = {
                "lora_A": layout.along(COLUMNS, (lora.rank, width)),
                "lora_B": layout.along(ROWS, (rows, lora.rank)),
                "lora_magnitude": layout.along(ROWS, (rows,)),
            }
            adapter = adapter_of(parameters[f"{name}.weight"], lora, random, layout, layouts["lora_A"], dtype, offload)
            self.adapters[name] = adapter
            self.layouts |= {f"{name}.{key}": layouts[key] for key in adapter.tensors()}
            self.layouts[f"{name}.weight"] = layout
        dither_merges(self.adapters, dtype, self.layouts)
        self.tensors = self.heads.tensors | {
            f"{name}.{key}": t for name, x in self.adapters.items() for key, t in x.tensors().items()
        }

    def gather(self) -> None:
        """Turn gradients of merged weights into those of A, B and magnitudes, summed over the ranks with the rest."""
        self.heads.gather()
        for adapter in self.adapters.values():
            merged: Any = adapter.parameter
            if merged.grad is not None:
                adapter.absorb(merged.grad.to_local())
                merged.grad = None
        sums: dict[dist.ProcessGroup, list[Tensor]] = {}
        for name, adapter in self.adapters.items():
            layout, everywhere = self.layouts[f"{name}.weight"], [self.group] * (f"{name}.weight" in self.summands)
            for key, tensor in adapter.tensors().items():
                for group in (*layout.groups(ROWS if key == "lora_A" else COLUMNS), *everywhere):
                    sums.setdefault(group, []).append(tensor)
        for group, tensors in sums.items():
            sum_gradients(tensors, group)

    def publish(self) -> None:
        """Merge into this rank's parts of the weights."""
        with torch.no_grad():
            for adapter in self.adapters.values():
                local(adapter.parameter).copy_(adapter.merged())

    def loaded(self) -> None:
        """Call after writing `tensors` and `marks`. Raises `BirlError` if they belong to another base."""
        self.origin.check()
        self.publish()

    def weights(self) -> dict[str, Tensor]:
        """All float32 weights by the model's names, as DTensors."""
        result = {name: p.detach().float() for name, p in self.model.named_parameters()} | self.heads.weights()
        for name, adapter in self.adapters.items():
            result[f"{name}.weight"] = self.layouts[f"{name}.weight"].whole(adapter.merged())
        return result

    def whole(self, name: str, value: Tensor) -> Tensor:
        if name in self.heads.tensors:
            return self.heads.whole(name, value)
        return value if value.ndim == 0 else self.layouts[name].whole(value, self.tensors[name].shape)

    def copies(self, name: str) -> int:
        return self.heads.copies(name) if name in self.heads.tensors else self.layouts[name].copies()


def adapter_of(
    parameter: nn.Parameter,
    lora: Lora,
    random: torch.Generator,
    layout: Layout,
    of_a: Layout,
    dtype: torch.dtype,
    offload: bool,
) -> Adapter:
    """Adapter of this rank's block of a weight; every rank draws all of A, so that it equals that of a single rank."""
    weight = local(parameter).detach()
    base = kept(weight, dtype, offload)
    total = over(layout.groups(COLUMNS))
    return Adapter(
        parameter=parameter,
        weight=base,
        a=of_a.part(first_a(lora, layout.shape[1], random)).to(weight.device).clone(),
        b=torch.zeros(len(weight), lora.rank, device=weight.device, dtype=torch.float32),
        magnitude=lengths(base.to(weight.device, torch.float32), total) if lora.dora else None,
        scale=lora.alpha / lora.rank,
        total=total,
    )


def over(groups: Sequence[dist.ProcessGroup]) -> Total | None:
    """Return the sum over the ranks of all `groups`; None if there are none."""

    def total(part: Tensor) -> Tensor:
        for group in groups:
            dist.all_reduce(part, group=group)
        return part

    return total if groups else None
