"""Memory of one rank of a layout, by purpose [bytes].

Float32 weights, gradients and optimizer state are split over all axes but ddp (copies); if nothing is split, the
bfloat16 weights come on top. Between blocks tokens are split over cp and tp (sequence parallelism), within
them over cp, and heads and inner features over tp. `tests/gpu/test_ranks_memory.py` compares it with what a step of the
learner allocates.
"""

from dataclasses import dataclass

from birl.models.shape import Shape, backward_bytes
from birl.plan.cluster import Layout, Workload

RESERVED = 3e9  # CUDA, NCCL's buffers and the libraries; assumed
USABLE = 0.95  # share of the memory; the rest is lost to the allocator's fragmentation; assumed
#: bytes of both moments of a parameter; in 8 bits with a float32 scale for each 256 (`learner/adamw8bit.py`)
STATE = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}
LOGIT = 12  # bytes if all are in memory, float32: log-softmax, the gradient by it, and that by the logits


def kept(shape: Shape, keep: str, tp: int = 1, seen: float = 0.0) -> float:
    """Bytes that a layer keeps for its backward pass for each token of its blocks, mean over layers; bfloat16. `seen`:
    keys that are gathered for each token (cp)."""
    if keep == "inputs":
        return 2.0 * shape.hidden / tp
    query, value = shape.widths
    keys = query + value if shape.latent else 2 * shape.kv_heads * shape.head_dim
    moved = 2 * shape.chosen * shape.hidden * shape.sparse_layers / shape.layers  # copies of tokens at their experts
    if keep == "half":
        products = 2 * shape.hidden + query + keys + (shape.matrices - 1) * mlp_width(shape) + moved
        return 2 * (shape.hidden + value + products / 2) / tp
    attention = (1 + shape.head_norms) * (query + keys) + value + seen * keys + 2 * shape.heads  # and sums of rows
    inner = shape.matrices * dense_width(shape) + (shape.matrices + 1) * (mlp_width(shape) - dense_width(shape))
    # both residual sums are split; both normed inputs have all tokens of the block
    return 2 * (2 * shape.hidden + moved + (2 * shape.hidden + attention + inner) / tp)


def mlp_width(shape: Shape) -> float:
    """MLP width that one token goes through, mean over layers."""
    sparse = shape.sparse_layers * (shape.chosen * shape.expert_inner + shape.shared_inner)
    return dense_width(shape) + sparse / shape.layers


def dense_width(shape: Shape) -> float:
    """MLP width of layers without experts, mean over all layers."""
    return (shape.layers - shape.sparse_layers) * shape.inner / shape.layers


def memory(shape: Shape, layout: Layout, work: Workload) -> dict[str, float]:
    """Bytes of one rank, by purpose, at the peak of a micro-batch that is not the first of its step."""
    own = shape.parameters / (layout.fsdp * layout.cp * layout.tp * layout.pp)
    worst = max(moments(shape, layout, Passes.of(shape, layout, work)), key=lambda moment: sum(moment.values()))
    state = {"weights, float32": 4 * own, "gradients, float32": 4 * own, "optimizer state": STATE[work.optimizer] * own}
    return state | worst | {"reserved": RESERVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Memory of a micro-batch on a rank, beside weights and their gradients [bytes]. activations: of all layers until
    their backward passes; one: of the last; again: what its backward pass recomputes, and `layer` its workspace; head:
    hidden states there, and `logits` of its backward pass."""

    activations: float
    one: float
    again: float
    layer: float
    head: float
    logits: float

    @classmethod
    def of(cls, shape: Shape, layout: Layout, work: Workload) -> "Passes":
        rows, vocab = work.microbatch / layout.cp, -(-shape.vocabulary // layout.tp)
        layers = shape.layers / layout.pp * min(layout.pp, -(-work.batch // (work.microbatch * layout.shares)))
        seen = layout.cp + 0.5 if layout.cp > 1 else 0.0
        one = rows * kept(shape, work.keep, layout.tp, seen)
        logits = LOGIT * min(work.logits, rows) * vocab
        return cls(
            activations=layers * one,
            one=one,
            again=rows * kept(shape, "all", layout.tp, seen) if work.keep != "all" else 0.0,
            layer=passing(shape, layout, rows, work.microbatch / work.sequence),
            head=4 * shape.hidden * rows,
            logits=logits or backward_bytes(int(rows), shape.hidden, vocab, 2, gpu=True, master=layout.splits == 1),
        )


def moments(
    shape: Shape, layout: Layout, passes: Passes, wide: int = 2, trains_ends: bool = True
) -> list[dict[str, float]]:
    """Memory of a rank beside weights, gradients and state: in the backward pass of the head, of the last layer, of the
    second to last while the last one's gradient is reduced, and of the embedding. The head's gradient is kept until all
    layers are done, also a gathered weight shared with the embedding. `wide`: bytes of a weight in compute type;
    `trains_ends`: embedding and head have gradients."""
    at_head = {"activations": passes.activations + passes.head, "logits": passes.logits}
    if layout.splits == 1:  # these weights are always in memory, gradients go to masters at once
        whole = {"weights, bfloat16": wide * shape.parameters / layout.pp}
        last = {"activations": passes.activations + passes.again, "a layer's backward": passes.layer}
        return [whole | at_head, whole | last]
    dense, experts, ends = gathered(shape, layout)
    layer, by_head = dense + experts, wide * ends * trains_ends
    reduced = 4 * (layer if layout.ep == 1 else dense)  # experts' come before
    both = by_head * (1 if shape.tied else 2) + 4 * ends * trains_ends * (1 + 1 / (layout.fsdp * layout.cp))
    return [
        at_head | {"gathered weights": wide * (ends + layer), "gathered gradients": by_head},
        *(
            {
                "activations": passes.activations - before * passes.one + passes.again,
                "a layer's backward": passes.layer,
                "gathered weights": wide * (ends * shape.tied + 2 * layer),
                "gathered gradients": by_head + before * reduced,
            }
            for before in (0, 1)
        ),
        {"activations": 0.0, "gathered gradients": both},
    ]


def passing(shape: Shape, layout: Layout, rows: float, sequences: float = 1.0) -> float:
    """Workspace of one layer's backward pass beside the kept activations [bytes]: at its last product's inputs, with
    the gradient of its weight; with experts where their outputs are joined, or at their first product, when half of the
    kept activations are freed; or of attention, when those behind it are."""
    behind = 2 * rows * (shape.hidden + (shape.hidden + (shape.matrices + 1) * mlp_width(shape)) / layout.tp)
    least = attention_workspace(shape, layout, rows, sequences) - behind
    if not shape.experts:
        return max((4 * rows + 2 * shape.hidden) * shape.inner / layout.tp, least)
    experts, copies = gathered(shape, layout)[1], rows * shape.chosen
    return max(copies * 4 * shape.hidden, 2 * experts - copies * 4 * shape.expert_inner, least)


def attention_workspace(shape: Shape, layout: Layout, rows: float, sequences: float) -> float:
    """Bytes of FlashAttention 2's backward pass (`mha_varlen_bwd` of PyTorch's flash_api.cpp): the queries' gradient in
    float32, with 128 further rows for each of the `sequences`; gradients of the keys and values of all tokens of the
    row for each query head, if there are fewer key heads; and gradients of all its inputs and of its result."""
    if shape.latent:  # other attention: keys are wider than values
        return 0.0
    query, keys = (heads * shape.head_dim / layout.tp for heads in (shape.heads, shape.kv_heads))
    seen, pieces = rows * layout.cp, sequences * min(layout.cp, 2)
    expanded = 4 * seen * query * (shape.kv_heads < shape.heads)
    return 4 * (2 * rows + 128 * pieces) * query + expanded + 4 * seen * keys


def gathered(shape: Shape, layout: Layout) -> tuple[float, float, float]:
    """Number of parameters that a rank gathers: of one layer without experts; of its own experts of one layer; of the
    embedding (or head)."""
    dense = shape.parameters - shape.expert_parameters - shape.embedding * (1 if shape.tied else 2)
    one = shape.layers * layout.tp
    return dense / one, shape.expert_parameters / layout.ep / one, shape.embedding / layout.tp
