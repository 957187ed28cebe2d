"""LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353): train small matrices A and B instead of the weights.

The module keeps its ordinary linear layers, which always hold the merged weight W + s B A, rounded to the compute type
(`rounding.py`). So engine, kernels and learner need no code for adapters. A backward pass computes the gradient G of
one merged weight after another; each is turned into those of A and B (dB = s G A', dA = s B' G), which are summed in
float32 over micro-batches, and is freed before the next. The optimizer steps A and B, then weights are merged again. A
merge starts from W, never from the last merge, so there is no drift.

Memory: W is kept beside the merged weight, rounded to the compute type, as bfloat16 if that is exact, else as float32;
on a GPU in CPU memory, from where every merge reads it once (not with DoRA, whose gradients need it).
A quantised base (`models/quantized.py`) is kept as codes: there is no merged weight, each product merges again.

Shapes: a weight is [N, K]; A [R, K], B [N, R], magnitude [N].
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from birl.errors import BirlError
from birl.learner.optimizer import Masters, MasterWeights, bring
from birl.learner.rounding import Dither, dither_merges
from birl.models.heads import HEADS, score_head
from birl.models.quantized import QuantizedLinear, quantized_layers
from birl.models.slices import values
from birl.models.vision import still

ALL = "all-linear"
#: last names of layers whose weight transformers reads without calling the layer, so that adapters beside it (peft's)
#: have no effect: Mamba 1's time steps, LongCat's router
UNCALLED = {"dt_proj", "classifier"}
#: a part of a sum, [N] -> the sum over the ranks that have the other parts
Total = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """targets: names of linear layers by peft's rules ("q_proj", "layers.0.mlp.up_proj"), or "all-linear": all but the
    head and `UNCALLED`. seed: of A, which is random; B is zero, so that the initial policy is the base model. policies:
    names; each has its own matrices, and `past` earlier versions of them (`policies.py`)."""

    rank: int
    alpha: float = 32.0
    targets: Sequence[str] = (ALL,)
    dora: bool = False
    seed: int = 0
    policies: tuple[str, ...] = ()
    past: int = 0


def merged(
    weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float, total: Total | None = None
) -> Tensor:
    """V = W + s B A; with a magnitude m, V's rows are scaled to that length: m V / |V|. The gradient treats |V| as a
    constant (DoRA section 4.3, as in peft)."""
    whole = torch.addmm(weight, b, a, alpha=scale)
    return whole if magnitude is None else whole * (magnitude / lengths(whole.detach(), total))[:, None]


def lengths(weight: Tensor, total: Total | None = None) -> Tensor:
    """Norms of the rows, of which other ranks may have the other columns; never 0, so that one can divide by them."""
    result = torch.linalg.vector_norm(weight, dim=1) if total is None else total(weight.square().sum(1)).sqrt()
    return result.clamp_min(torch.finfo(weight.dtype).tiny)


def targets(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Names of the selected linear layers, in the model's order. Raises `BirlError` for a target that selects none."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    head = model.get_output_embeddings()  # pyright: ignore
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in HEADS]
    kept = still(model)
    linear = [n for n, m in modules if m is not head and f"{n}.weight" not in kept and 0 not in m.weight.shape]
    result: set[str] = set()
    for target in wanted:
        rule = LoraConfig(target_modules=[target])
        called = [n for n in linear if n.rpartition(".")[2] not in UNCALLED]
        meant = called if target == ALL else [n for n in linear if check_target_module_exists(rule, n)]
        if not meant:
            names = ", ".join(sorted({n.rpartition(".")[2] for n in linear}))
            raise BirlError(
                f"lora.targets={target}: no linear layer of {type(model).__name__} has that name. There are {names} "
                f"(one of a layer: {linear[0]}), or take {ALL}."
                if linear
                else f"lora.targets={target}: {type(model).__name__} has no linear layers. Set lora.rank=0."
            )
        result.update(meant)
    return [n for n in linear if n in result]


@dataclass(slots=True, eq=False)
class Adapter:
    """LoRA adapter of one weight. Kernels and autograd see it as the weight's master."""

    parameter: nn.Parameter  # holds the merged weight, unless W is quantised
    weight: Tensor | QuantizedLinear  # W
    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float
    total: Total | None = None
    dither: Dither | None = None

    @classmethod
    def of(cls, linear: nn.Linear, lora: Lora, random: torch.Generator, dtype: torch.dtype, offload: bool) -> "Adapter":
        rows, width = linear.weight.shape
        if isinstance(linear, QuantizedLinear):
            base, device = linear, linear.codes.device
        else:
            weight = linear.weight.detach()
            base = kept(weight, dtype, offload or (weight.is_cuda and not lora.dora))
            device = torch.device("cpu") if offload else weight.device
        result = cls(
            parameter=linear.weight,  # pyright: ignore
            weight=base,
            a=first_a(lora, width, random).to(device),
            b=torch.zeros(rows, lora.rank, device=device, dtype=torch.float32),
            magnitude=None,
            scale=lora.alpha / lora.rank,
        )
        result.magnitude = lengths(result.base()) if lora.dora else None
        return result

    def tensors(self) -> dict[str, Tensor]:
        result = {"lora_A": self.a, "lora_B": self.b}
        return result if self.magnitude is None else result | {"lora_magnitude": self.magnitude}

    def base(self) -> Tensor:
        """W in float32, on the device of A and B."""
        if isinstance(self.weight, QuantizedLinear):
            return self.weight.base()
        return self.weight.to(self.a.device, non_blocking=True).float()

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Merged weight [N, K] float32, dithered if it will be rounded to bfloat16."""
        result = merged(self.base(), self.a, self.b, self.magnitude, self.scale, self.total)
        return result if self.dither is None else self.dither(result)

    def absorb(self, grad: Tensor) -> None:
        """Turn a gradient of the merged weight into those of A, B and the magnitude, and add them."""
        whole = grad.float()
        if self.magnitude is None:  # on the device of the gradient, which is large; what comes of it is small
            a, b = self.a.to(whole.device), self.b.to(whole.device)
            grads = [(b.T @ whole).mul_(self.scale).to(self.a.device), (whole @ a.T).mul_(self.scale).to(self.a.device)]
        else:
            whole = whole.to(self.a.device)
            leaves = a, b, m = [t.detach().requires_grad_() for t in (self.a, self.b, self.magnitude)]
            with torch.enable_grad():
                value = merged(self.base(), a, b, m, self.scale, self.total)
            grads = torch.autograd.grad(value, leaves, whole)
        self.add(grads)

    def absorb_product(self, x: Tensor, grad: Tensor) -> None:
        """The same for y = x V', from x [T, K] and the gradient by y [T, N]; the gradient by V [N, K] is only computed
        with a magnitude."""
        if self.magnitude is not None:
            self.absorb(grad.T @ x)
            return
        x, grad = x.float(), grad.float()
        self.add([((grad @ self.b).T @ x).mul_(self.scale), (grad.T @ (x @ self.a.T)).mul_(self.scale)])

    def add(self, grads: Sequence[Tensor]) -> None:
        """Add to the gradients of A, B and the magnitude."""
        for tensor, each in zip(self.tensors().values(), grads, strict=True):
            tensor.grad = each if tensor.grad is None else tensor.grad.add_(each)

    def absorb_from(self, parameter: Tensor) -> None:
        """Hook after autograd's backward pass of the merged weight; kernels call `absorb` and leave no gradient."""
        if parameter.grad is not None:
            self.absorb(parameter.grad)
            parameter.grad = None


def first_a(lora: Lora, width: int, random: torch.Generator) -> Tensor:
    """Initial A, as in peft; drawn on the CPU, so the same on every device."""
    a = torch.empty(lora.rank, width, dtype=torch.float32)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=random)
    return a


def kept(weight: Tensor, dtype: torch.dtype, offload: bool) -> Tensor:
    """Copy of W, rounded to `dtype`: a weight halfway between two of its numbers would be rounded along the sign of a
    step of any size (`rounding.py`)."""
    nearest = weight.to(dtype)
    rounded = nearest.to(torch.bfloat16)
    result = rounded if torch.equal(rounded.to(dtype), nearest) else nearest
    if not offload:
        return result.clone() if result is weight else result
    result = result.to("cpu", copy=True)
    return result.pin_memory() if weight.is_cuda else result


class Origin:
    """The base model, by its digest, and the alpha that the matrices belong to. A checkpoint has both, as `marks`."""

    def __init__(self, base: bytes, alpha: float) -> None:
        self.base, self.alpha = base, alpha
        self.marks = {
            "lora.base": torch.empty(32, dtype=torch.uint8),
            "lora.alpha": torch.empty((), dtype=torch.float64),
        }
        self._write()

    def check(self) -> None:
        """Raises `BirlError` if other values were written into `marks`, which are restored in any case."""
        base, alpha = bytes(self.marks["lora.base"].tolist()), self.marks["lora.alpha"].item()
        self._write()
        if base != self.base:
            raise BirlError(
                "The checkpoint holds LoRA matrices for another base model: the weights of model.path are not those "
                "that the run began with, or lora.quantize is another. Set model.path and lora.quantize as they were."
            )
        if alpha != self.alpha:
            raise BirlError(
                f"lora.alpha={self.alpha:g}: the checkpoint was trained with lora.alpha={alpha:g}, and its matrices "
                f"would mean other weights. Set lora.alpha={alpha:g}."
            )

    def _write(self) -> None:
        self.marks["lora.base"].copy_(torch.tensor(list(self.base), dtype=torch.int64))
        self.marks["lora.alpha"].fill_(self.alpha)


class Adapters(Masters):
    """A, B and magnitudes as the masters of a module's weights."""

    def __init__(self, model: nn.Module, lora: Lora, dtype: torch.dtype, offload: bool = False) -> None:
        self.model = model
        self.origin = Origin(digest(model), lora.alpha)
        self.marks = self.origin.marks
        model.requires_grad_(False)
        for name in HEADS:
            if head := score_head(model, name):
                head.requires_grad_(True)
        self.heads = MasterWeights(model, dtype, offload)  # new ones, which are trained whole
        random = torch.Generator().manual_seed(lora.seed)
        self.adapters = {
            name: Adapter.of(model.get_submodule(name), lora, random, dtype, offload)  # pyright: ignore
            for name in targets(model, lora.targets)
        }
        dither_merges(self.adapters, dtype)
        for adapter in self.adapters.values():
            adapter.parameter.requires_grad_(True)
            adapter.parameter.register_post_accumulate_grad_hook(adapter.absorb_from)
            adapter.parameter.master = adapter  # pyright: ignore  birl's kernels hand their gradient to it
        matrices = {f"{name}.{key}": t for name, x in self.adapters.items() for key, t in x.tensors().items()}
        self.tensors = self.heads.tensors | matrices

    def gather(self) -> None:
        self.heads.gather()  # gradients of merged weights are in A, B and magnitudes already

    def publish(self) -> None:
        """Merge into the module's parameters, and invalidate all copies of these; quantised layers have only such
        copies."""
        self.heads.publish()
        with torch.no_grad():
            for adapter in self.adapters.values():
                if adapter.parameter.is_meta:
                    continue
                if self.heads.gradients is not None:
                    bring(adapter.parameter, adapter.merged())
                else:
                    adapter.parameter.copy_(adapter.merged())

    def loaded(self) -> None:
        """Call after writing `tensors` and `marks`. Raises `BirlError` if they belong to another base."""
        self.origin.check()
        self.publish()

    def weights(self) -> dict[str, Tensor]:
        """All float32 weights by the model's names: merged ones of trained layers, the module's weights of all
        others."""
        result = {name: p.detach().float() for name, p in self.model.named_parameters() if not p.is_meta}
        result |= {name: layer.matrix().float() for name, layer in quantized_layers(self.model).items()}
        return result | self.heads.weights() | {f"{name}.weight": x.merged() for name, x in self.adapters.items()}


def digest(model: nn.Module) -> bytes:
    """SHA-256 of all float32 weights but new heads. A checkpoint has it in place of the weights."""
    result = hashlib.sha256()
    for name, value in values(model):
        if name.removesuffix(".weight") in HEADS:
            continue
        result.update(f"{name} {tuple(value.shape)}".encode())
        result.update(value.detach().float().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return result.digest()
