"""Time of a training step by a roofline model: matrix products, HBM, links inside and between machines.

FSDP's all-gathers and reduce-scatters overlap with computation, within each pass of each layer: the longer of the two
counts. Not overlapped: tensor, context and expert parallelism, the first gather, ddp's all-reduce, AdamW.
"""

from dataclasses import dataclass

from birl.models.shape import Shape
from birl.plan.cluster import LINKS, Cluster, Layout, Workload
from birl.plan.rank_memory import gathered, mlp_width

ADAMW = 32  # bytes read and written for a parameter's step, and its gradient read for the norm
OPTIMIZERS = {"adamw": ADAMW, "adamw8bit": 258}  # the same for 47 operations of PyTorch, each of which reads and writes
LOGIT = 20  # bytes read and written for a logit, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by part. `exposed`: communication that does not overlap with computation."""

    seconds: float
    products: float  # alone, without the elementwise part of layers
    elementwise: float  # HBM
    exposed: dict[str, float]  # axis -> seconds
    bubble: float  # of a pipeline
    optimizer: float
    tokens: float  # per second and GPU
    mfu: float  # model FLOP/s divided by the peak; causal attention


def step(shape: Shape, cluster: Cluster, layout: Layout, work: Workload) -> StepTime:
    """Time of one optimizer step. Micro-batches are full, except that each data-parallel rank has at least one."""
    rounds = max(work.batch / (work.microbatch * layout.shares), 1.0)
    batch = rounds * work.microbatch * layout.shares
    layer = LayerTime(shape, cluster, layout, work)
    own = shape.layers / layout.pp
    forward, backward = layer.forward, layer.backward
    gather, reduce = layer.gathering
    links = {"tp": layer.tensor, "cp": layer.context, "ep": layer.experts}
    wait = max(gather - forward, 0.0) + max(gather + reduce - backward, 0.0)
    ends = layer.ends / layout.pp
    micro = own * (forward + backward + wait + sum(links.values())) + ends
    bubble = micro * (layout.pp - 1) / layout.virtual
    split = layout.fsdp * layout.cp * layout.tp * layout.pp
    optimizer = OPTIMIZERS[work.optimizer] * shape.parameters / split / cluster.hbm
    copies = 0.0
    if layout.ddp > 1:  # once, before the optimizer's step
        ring = cluster.bandwidth(layout.ddp, layout.fsdp * layout.cp * layout.tp)
        copies = 2 * (layout.ddp - 1) / layout.ddp * 4 * shape.parameters / split / ring
    seconds = rounds * micro + bubble + gather + copies + optimizer
    per_gpu = batch / seconds / layout.size
    return StepTime(
        seconds=seconds,
        products=rounds * (own * sum(layer.products) + ends),
        elementwise=rounds * own * sum(layer.elementwise),
        exposed={name: rounds * own * value for name, value in links.items()}
        | {"fsdp": rounds * own * wait + gather, "ddp": copies},
        bubble=bubble,
        optimizer=optimizer,
        tokens=per_gpu,
        mfu=per_gpu * shape.flops(work.sequence) / cluster.flops,
    )


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one micro-batch in one layer on one rank; pairs are of the forward and the backward pass."""

    shape: Shape
    cluster: Cluster
    layout: Layout
    work: Workload

    @property
    def tokens(self) -> float:
        return self.work.microbatch / (self.layout.cp * self.layout.tp)

    @property
    def again(self) -> float:
        """Share of the forward pass's products that the backward pass recomputes."""
        return {"all": 0.0, "half": 0.5, "inputs": 1.0}[self.work.keep]

    @property
    def products(self) -> tuple[float, float]:
        """Forward 1, backward 2 plus what is recomputed; attention's backward has 5 products for 2 (FlashAttention, Dao
        et al. 2022, algorithm 4). Weights are read once a pass, which dominates with few tokens per expert."""
        shape, cluster = self.shape, self.cluster
        speed = cluster.flops * cluster.efficiency
        linear = 2 * shape.active / shape.layers * self.tokens / speed
        attention = shape.pair_flops / shape.layers * (self.work.sequence + 1) / 2 * self.tokens / speed
        read = 2 * sum(gathered(shape, self.layout)[:2]) / cluster.hbm
        once = max(linear, read)
        return once + attention, (2 + self.again) * once + (2.5 + (self.again == 1)) * attention

    @property
    def elementwise(self) -> tuple[float, float]:
        """Norms, residual sums, rotary embeddings and the activation read and write HBM in bfloat16, backward twice
        as much; a mixture of experts moves tokens to their experts and back."""
        shape = self.shape
        turned = shape.widths[0] + shape.kv_heads * (shape.head_dim + shape.rope_dim)  # queries and keys
        numbers = 10 * shape.hidden + 2 * turned + shape.matrices * mlp_width(shape)
        numbers += 4 * shape.chosen * shape.hidden * shape.sparse_layers / shape.layers
        once = 2 * numbers * self.tokens / self.cluster.hbm
        return once, (3 if self.work.keep != "all" else 2) * once

    @property
    def forward(self) -> float:
        return self.products[0] + self.elementwise[0]

    @property
    def backward(self) -> float:
        return self.products[1] + self.elementwise[1]

    @property
    def ends(self) -> float:
        """The head's products and its logits in HBM, once a micro-batch."""
        shape, cluster = self.shape, self.cluster
        products = 6 * shape.embedding * self.tokens / (cluster.flops * cluster.efficiency)
        return products + LOGIT * shape.vocabulary * self.tokens / cluster.hbm

    @property
    def gathering(self) -> tuple[float, float]:
        """FSDP: all-gather of a layer's bfloat16 weights for each pass, and reduce-scatter of its float32 gradients."""
        shape, layout, cluster = self.shape, self.layout, self.cluster
        ranks = layout.fsdp * layout.cp
        dense, experts, _ = gathered(shape, layout)
        seconds = (ranks - 1) / ranks * dense / cluster.bandwidth(ranks, layout.tp)
        rest = ranks // layout.ep
        seconds += (rest - 1) / rest * experts / cluster.bandwidth(rest, layout.tp * layout.ep)
        return 2 * seconds, 4 * seconds

    @property
    def tensor(self) -> float:
        """Two all-gathers and two reduce-scatters of the hidden states forward, as many backward, and the forward ones
        again if it is recomputed (Korthikanti et al. 2022, section 4.2.2)."""
        ranks = self.layout.tp
        size = 2 * self.shape.hidden * self.work.microbatch / self.layout.cp
        one = (ranks - 1) / ranks * size / self.cluster.bandwidth(ranks)
        return (8 + 4 * (self.again > 0)) * one

    @property
    def context(self) -> float:
        """All-gather of keys and values forward, and again if that is recomputed; reduce-scatter of their gradients."""
        shape, layout = self.shape, self.layout
        keys = sum(shape.widths) if shape.latent else 2 * shape.kv_heads * shape.head_dim
        size = 2 * keys * self.work.microbatch / layout.tp
        one = (layout.cp - 1) / layout.cp * size / self.cluster.bandwidth(layout.cp, layout.tp)
        return (2 + (self.again > 0)) * one

    @property
    def experts(self) -> float:
        """All-to-all of each token to its experts and back, forward and backward, with experts uniformly random. Each
        GPU sends what leaves the machine through its own network card."""
        shape, layout, cluster = self.shape, self.layout, self.cluster
        if layout.ep == 1:
            return 0.0
        near = min(max(cluster.node // layout.tp, 1), layout.ep)
        machines = layout.ep / near
        far, close = shape.chosen * (1 - 1 / machines), shape.chosen * (near - 1) / layout.ep
        if self.work.once:
            far = (machines - 1) * (1 - (1 - 1 / machines) ** shape.chosen)
            close = (1 - 1 / near) * layout.ep * (1 - (1 - 1 / layout.ep) ** shape.chosen)
        token = 2 * shape.hidden * shape.sparse_layers / shape.layers
        one = self.tokens * token * max(far / cluster.between, close / cluster.inside) / LINKS
        return (4 + 2 * (self.again > 0)) * one
