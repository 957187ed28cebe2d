"""Memory of one rank of a layout, by purpose [bytes].

Float32 weights, gradients and optimizer state are split over all ranks but copies (ddp); where nothing is split, the
bfloat16 weights are there beside them. Activations are split over cp and tp, norms included (sequence parallelism).
"""

from birl.models.shape import Shape, backward_bytes
from birl.plan.layout import Layout, Workload

RESERVED = 3e9  # CUDA, NCCL's buffers and the libraries; assumed
USABLE = 0.95  # of the memory; the allocator loses the rest between blocks; assumed
#: bytes of both moments of a parameter; in 8 bits with a float32 scale for each 256 (`learner/adamw8bit.py`)
STATE = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}
LOGIT = 10  # bytes where all are there at once: float32, and its gradient in float32 and bfloat16


def kept(shape: Shape, keep: str) -> float:
    """Bytes that a layer keeps of a token until its backward pass, the mean over layers. bfloat16; float32 copies in
    two norms where all is kept."""
    if keep == "inputs":
        return 2.0 * shape.hidden
    query, value = shape.widths
    keys = query + value if shape.latent else 2 * shape.kv_heads * shape.head_dim
    inner = mlp_width(shape)
    moved = 2 * shape.chosen * shape.hidden * shape.sparse_layers / shape.layers  # copies of tokens at their experts
    products = 2 * shape.hidden + query + keys + (shape.matrices - 1) * inner + moved
    if keep == "half":
        return 2 * (shape.hidden + value + products / 2)
    return 2 * (shape.hidden + value + products) + 8 * shape.hidden + 2 * (2 * shape.hidden + 2 * inner)


def mlp_width(shape: Shape) -> float:
    """Inner width of what one token goes through, the mean over layers."""
    sparse = shape.sparse_layers * (shape.chosen * shape.expert_inner + shape.shared_inner)
    return ((shape.layers - shape.sparse_layers) * shape.inner + sparse) / shape.layers


def memory(shape: Shape, layout: Layout, work: Workload) -> dict[str, float]:
    """Bytes of one rank, by purpose, at the worst moment: the end of a backward pass's first layer."""
    split = layout.fsdp * layout.cp * layout.tp * layout.pp
    tokens = work.microbatch / (layout.cp * layout.tp)
    dense = (shape.parameters - shape.expert_parameters) / split
    experts = shape.expert_parameters / split
    own = dense + experts
    result = {
        "weights, float32": 4 * own,
        "gradients, float32": 4 * own,
        "optimizer state": STATE[work.optimizer] * own,
    }
    if layout.fsdp * layout.cp > 1:
        layer, ends = whole(shape, layout)
        result["gathered weights"] = 2 * (2 * layer + ends)
        result["gathered gradients"] = 6 * max(layer, ends)  # bfloat16, and float32 on their way
    else:
        result["weights, bfloat16"] = 2 * own
    layers = shape.layers / layout.pp * min(layout.pp, -(-work.batch // (work.microbatch * layout.shares)))
    again = kept(shape, "all") if work.keep != "all" else 0.0
    result["activations"] = tokens * (layers * kept(shape, work.keep) + again + 8 * shape.hidden)
    result["a layer's backward"] = tokens * (4 * shape.hidden + 8 * (shape.hidden + mlp_width(shape)))
    rows, words = work.microbatch // layout.cp, -(-shape.vocabulary // layout.tp)
    chunks = backward_bytes(rows, shape.hidden, words, 2, gpu=True)
    result["logits"] = LOGIT * min(work.logits, rows) * words if work.logits else chunks
    result["reserved"] = RESERVED
    return result


def whole(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Parameters that a rank gathers: of one layer (its own experts of them), and of the embedding and the head."""
    experts = shape.expert_parameters / layout.ep
    ends = shape.embedding * (1 if shape.tied else 2)
    dense = shape.parameters - shape.expert_parameters - ends
    return (dense + experts) / shape.layers / layout.tp, ends / layout.tp
