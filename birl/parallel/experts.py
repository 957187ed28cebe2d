"""Expert parallelism: each of `ep` ranks has E / ep whole experts of every layer, and tokens are sent to them.

    my tokens x k experts  ->  sorted by expert  ->  all-to-all  ->  grouped matmul  ->  all-to-all  ->  weighted sum

An expert's output for a token does not depend on its rank, so the numbers are those of one rank; the backward pass
takes the same way back. No token is dropped, however uneven the routing is: the fullest rank is the slowest.

The `ep` ranks are adjacent in the dimension that FSDP splits weights over, so they have different tokens. Experts are
split over them by number and over the remaining ranks (fsdp x cp / ep) by FSDP; everything else by FSDP over all.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from birl.errors import BirlError
from birl.parallel.layout import local
from birl.parallel.ranks import Ranks

NAME = "birl_parallel"
PLAIN = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Modules of all layers that hold experts as parameters [E, out, in]."""
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]


def spread(model: nn.Module, ranks: Ranks) -> list[nn.Module]:
    """Shard the experts over `ranks`, as DTensors [E, out, in] split in the first dimension, and route tokens to them.
    Returns the modules with experts. Raises `BirlError` if that is impossible."""
    assert ranks.experts is not None
    result, ep, rest = experts_of(model), ranks.grid.ep, ranks.experts["rest"].size()
    if not result:
        raise BirlError(f"parallel.ep={ep}: {type(model).__name__} has no experts. Set parallel.ep=1.")
    group, place = ranks.experts.get_group("ep"), ranks.experts.get_local_rank("ep")
    for module in result:
        check(module, ep, rest)
        for name, parameter in list(module.named_parameters(recurse=False)):
            mine = parameter.data.chunk(ep)[place].clone()
            split = DTensor.from_local(mine, ranks.experts["ep"], [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        cast(Any, module).group = group
    cast(Any, model).set_experts_implementation(NAME)
    return result


def check(module: nn.Module, ep: int, rest: int) -> None:
    """Raises `BirlError` if these experts cannot be spread over `ep` ranks and sharded over `rest` more."""
    what = type(module).__name__
    if any(getattr(module, name, value) != value for name, value in PLAIN.items()):
        raise BirlError(
            f"parallel.ep={ep}: {what} has biases, or another shape than Qwen3-MoE's and Mixtral's experts, which birl "
            "cannot spread over ranks. Set parallel.ep=1: FSDP splits them like all other weights."
        )
    for name, parameter in module.named_parameters(recurse=False):
        if len(parameter) % ep:
            raise BirlError(
                f"parallel.ep={ep}: {what} has {len(parameter)} experts, which {ep} ranks cannot share evenly. Take a "
                f"divisor of {len(parameter)}."
            )
        if parameter.shape[1] % rest:
            raise BirlError(
                f"parallel.ep={ep}: {rest} ranks remain to split the {parameter.shape[1]} rows of each expert's {name}"
                f", which {rest} does not divide. Raise parallel.ep."
            )


def experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Forward called by transformers: hidden [T, H], experts of each token [T, k] and weights [T, k] -> [T, H]."""
    tokens, k = index.shape
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(module.num_experts).index_add_(0, flat, torch.ones_like(flat))  # bincount syncs with a GPU
    copies = hidden[:, None].expand(-1, k, -1)  # with gradients summed in float32
    result = there_and_back(module, copies.reshape(tokens * k, hidden.shape[1])[order], counts)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (result[back].view(tokens, k, hidden.shape[1]) * weights[..., None]).sum(1).to(hidden.dtype)


def there_and_back(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Send rows [S, H] sorted by expert, `counts` [E] of each, to their experts' ranks and back -> [S, H]."""
    group = module.group
    ep = dist.get_world_size(group)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    both = torch.stack([counts, arriving]).view(2, ep, len(counts) // ep)
    sent, received = both.sum(-1).tolist()
    rows = exchange(rows, sent, received, group)
    # they arrive by rank, then by expert; the products need all rows of an expert together
    expert = torch.arange(both.shape[-1], device=rows.device).repeat(ep)
    expert = expert.repeat_interleave(arriving, output_size=sum(received))
    order = expert.argsort(stable=True)
    rows = rows[order]  # reuses the name, so that the old rows are freed
    rows = products(module, rows, both[1].sum(0))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = rows[back]
    return exchange(rows, received, sent, group)


def products(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """The experts of this rank on rows [S, H] sorted by expert, `counts` [experts] of each -> [S, H]."""
    gate_up, down = (local(p) for p in (module.gate_up_proj, module.down_proj))
    return grouped(module._apply_gate(grouped(rows, gate_up, counts)), down, counts)


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [S, in] of expert after expert times the transpose of its weights [experts, out, in] -> [S, out]."""
    if in_one(rows, weights):
        offsets = counts.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=offsets)
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights.unbind(), strict=True)])


def in_one(rows: Tensor, weights: Tensor) -> bool:
    """Whether PyTorch has a grouped matmul here: for sizes in multiples of 16 bytes, on CUDA for bfloat16."""
    device, sizes = rows.device.type, all(n * weights.element_size() % 16 == 0 for n in weights.shape[1:])
    if not sizes or not hasattr(nn.functional, "grouped_mm"):
        return False
    if device != "cuda":
        return device == "cpu"
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        back = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """All-to-all of rows [S, H], the first sent[0] to the first rank of the group and so on; returns the received rows
    in the order of ranks. Differentiable: gradients are sent back."""
    return cast(Tensor, _Exchange.apply(rows, sent, received, group))


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
