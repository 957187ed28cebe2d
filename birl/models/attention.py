"""birl's attention function, registered with transformers as "birl", for training, prefill and decode.

transformers calls it once a layer with the `layout` that was passed to the model's forward:

    Packed   many sequences in a single row [1, T], as trees (`data/trees.py`): a common prefix is stored once,
             computed once, and attended to by all of its sequences
    Paged    the next tokens of running sequences; keys and values are in the pages of a KV cache (`models/paged.py`)

so there is no global state, no padding, and no mask of transformers (which would be wrong: with `position_ids` that
restart, transformers packs silently wrongly unless `use_cache=False`).

Shapes: H query heads, K key heads, G = H / K queries for each key head, D head size, T packed tokens, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from birl.data.trees import Tree, nodes, ways
from birl.errors import BirlError
from birl.kernels import Kernels
from birl.models import varlen
from birl.models.states import Step, by_trees
from birl.models.tree_attention import Area, tree_attention

NAME = "birl"
UNTOLD = -1  # attention was called without a sliding_window argument; None: with sliding_window=None
IGNORED = {
    *("position_ids", "cache_position", "output_attentions", "output_router_logits", "use_cache", "is_causal"),
    "position_embeddings",
}


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """Variants of softmax(scale q k') v in some architectures. None of birl's kernels computes them.

    cap     scores s become cap tanh(s / cap): Gemma 2, arXiv:2408.00118
    sinks   [H], one more score in each softmax of a head, without a value: gpt-oss, arXiv:2508.10925
    chunk   positions attend only to their own chunk, position // chunk: Llama 4
    """

    cap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Mutual:
    """Bidirectional attention among the tokens of a picture: Gemma 3 in every layer, Gemma 4 in sliding-window layers
    (`windowed`). `blocks`: (first row, count) of each contiguous run of rows, whose last row is the last of its
    picture."""

    blocks: tuple[tuple[int, int], ...]
    windowed: bool

    def of(self, window: int | None) -> tuple[tuple[int, int], ...]:
        """Blocks that apply in a layer with this window."""
        return () if self.windowed and window is None else self.blocks


class Layout(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        ...


class RowLayout(Layout, Protocol):
    def attend_rows(
        self, layer: int, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`attend` by birl's kernels: [T, H, D] -> [T, H * D], and log-sum-exp [T, H] if a backward pass needs it."""
        ...


@dataclass(frozen=True)
class Packed:
    """Attention within each tree of a packed row."""

    trees: Sequence[Tree]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    masks: dict[Any, Any] = field(default_factory=dict)  # made once, used by every layer
    mutual: Mutual | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        if variant is not None or (self.mutual is not None and self.mutual.of(window)):
            variant = variant or Variant()
            areas = self.areas(window, variant.chunk)
            return tree_attention(query[0], key[0], value[0], areas, scale, variant.cap, variant.sinks)[None]
        if not query.is_cuda:
            return tree_attention(query[0], key[0], value[0], self.areas(window), scale)[None]
        if len(query) == 1 and varlen.takes(query, value):
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            return varlen.attend(self.cut, q, k, v, scale, window)[None]
        gqa = query.shape[1] != key.shape[1]
        outputs, start = [], 0
        for tree in self.trees:
            cut = slice(start, start + len(tree))
            start = cut.stop
            q, k, v, mask = query[:, :, cut], key[:, :, cut], value[:, :, cut], self.mask(tree, window)
            part = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
            outputs.append(part)
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def attend_rows(
        self, layer: int, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return kernels.tree_attention(query, key, value, self.segments, scale)

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        """For layers that keep a state (`models/states.py`)."""
        return by_trees(self.trees, rows, step)

    @cached_property
    def segments(self) -> Tensor:
        """Nodes in the kernels' format: rows (first, count, parent, tokens above it, tree), int64. `parent` is a row of
        this table, or -1."""
        rows, tree = [], -1
        for node in nodes(self.trees):
            tree += node.parent < 0
            rows.append((*node, tree))
        return torch.tensor(rows, dtype=torch.int64).view(-1, 5)

    @cached_property
    def cut(self) -> varlen.Segments:
        """Segments of the trees for FlashAttention; made once a batch, not once a layer."""
        return varlen.segments(self.trees, self.device)

    def mask(self, tree: Tree, window: int | None) -> Tensor | None:
        """Attention mask of a tree, bool [n, n]; None if it is plain causal attention."""
        if len(tree.sizes) == 1 and (window is None or len(tree) <= window):
            return None
        if (tree, window) not in self.masks:
            self.masks[tree, window] = tree_mask(tree, window).to(self.device)
        return self.masks[tree, window]

    def areas(self, window: int | None, chunk: int | None = None) -> list[Area]:
        """Attention areas: each node's rows, and all tokens that they attend to."""
        if (window, chunk) not in self.masks:
            blocks = () if self.mutual is None else self.mutual.of(window)
            self.masks[window, chunk] = [
                area(node.first, node.count, way, window, chunk, self.device, blocks) for node, way in ways(self.trees)
            ]
        return self.masks[window, chunk]


def visible(
    rows: int,
    columns: int,
    window: int | None,
    chunk: int | None = None,
    blocks: Sequence[tuple[int, int]] = (),
    later: int = 0,
) -> Tensor:
    """Attention mask, bool [rows, columns]: tokens of a sequence, `later` tokens before its end, and all tokens in
    order. Each attends to itself and earlier ones, and the rest of its block (first row, count), within the newest
    `window` or its own chunk. A block may start before the rows and end after them."""
    start, seen = columns - later - rows, torch.arange(columns)
    position = torch.arange(start, start + rows)[:, None]
    last = position.clone()
    for first, count in blocks:
        last[max(first, 0) : first + count] = start + first + count - 1
    mask = last >= seen
    if window is not None:
        mask &= position - seen < window
    if chunk is not None:
        mask &= position // chunk == seen // chunk
    return mask


def area(
    first: int,
    count: int,
    way: Sequence[range],
    window: int | None,
    chunk: int | None,
    device: torch.device,
    blocks: Sequence[tuple[int, int]] = (),
) -> Area:
    """`count` rows from `first` on, and the columns that they attend to, in order of position. `blocks` of the packed
    row, each of which is within one node."""
    columns = slice(way[0].start, way[0].stop) if len(way) == 1 else places(way).to(device)
    own = [(row - first, n) for row, n in blocks if row < first + count and row + n > first]
    later = max([0, *(row + n - count for row, n in own)])
    mask = visible(count, sum(map(len, way)), window, chunk, own, later)
    return Area(first, columns, bias(mask.to(device)), causal=not own)


def places(way: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop) for r in way])


def tree_mask(tree: Tree, window: int | None) -> Tensor:
    """mask[i, j] = token i may attend to token j: j is not later, and on i's path from the root. bool [n, n]."""
    mask = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node, way in ways([tree]):
        columns = places(way)
        mask[node.first : node.first + node.count, columns] = visible(node.count, len(columns), window)
    return mask


def bias(mask: Tensor) -> Tensor:
    """0 where a mask is true, -inf elsewhere, float32."""
    return torch.zeros(mask.shape, device=mask.device, dtype=torch.float32).masked_fill_(~mask, float("-inf"))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = UNTOLD,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers. Raises `BirlError` for options that it would otherwise ignore."""
    name = type(module).__name__
    unknown = sorted(option for option, value in options.items() if value is not None and option not in IGNORED)
    unknown += ["dropout"] if dropout else []
    unknown += ["a mask of its own"] if attention_mask is not None else []
    unknown += [] if getattr(module, "is_causal", True) else ["later tokens are seen, too"]
    if unknown:
        raise BirlError(f"{name} wants attention that birl has no rule for: {', '.join(unknown)}.")
    if layout is None:  # a plain call, such as model(input_ids): every row is one sequence
        layout = Packed([Tree.of(query.shape[2])], query.device)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise BirlError(f"{name} does not say which layer it is; this architecture is not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window == UNTOLD:  # given only in the masks: Qwen2-MoE's layers have it, or Phi-MoE's config
        holder: Any = module.config if name == "PhimoeAttention" else module
        sliding_window = getattr(holder, "sliding_window", None)
    chunk = chunk_of(module, layer)
    if softcap is None and s_aux is None and chunk is None:
        return layout.attend(layer, query, key, value, scale, sliding_window), None
    variant = Variant(softcap, s_aux, chunk)
    return layout.attend(layer, query, key, value, scale, sliding_window, variant), None


def chunk_of(module: torch.nn.Module, layer: int) -> int | None:
    """Return the chunk size of a Llama 4 layer, which transformers has only in its mask; else None."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return config.attention_chunk_size if layer < len(kinds) and kinds[layer] == "chunked_attention" else None


def named(config: Any, name: str = NAME) -> Any:
    """transformers' name for the attention function; a vision tower keeps its own."""
    return {"": name, "text_config": name} if "vision_config" in config.sub_configs else name


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
