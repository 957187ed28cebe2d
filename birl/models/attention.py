"""The one attention function, registered with transformers as "birl": training, prefill and decoding run through it.

transformers calls it once a layer with whatever `layout` was passed to the model's forward:

    Packed   many sequences behind one another in a single row [1, T]; each may be a tree: a prefix (the prompt) that
             several branches (its answers) share, computed once and attended to by all
    Paged    the next tokens of running sequences; keys and values live in the pages of a cache (`models/paged.py`)

so nothing is read from globals, no padding exists, and no mask of transformers is used (it would be wrong: with
`position_ids` that restart, transformers packs silently wrongly unless `use_cache=False`).

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

from birl.errors import BirlError
from birl.kernels import Kernels
from birl.models import varlen
from birl.models.states import Step, by_trees
from birl.models.tree_attention import Area, tree_attention

NAME = "birl"
UNTOLD = -1  # attention was called without a sliding window; None: it was told that there is none
IGNORED = {
    *("position_ids", "cache_position", "output_attentions", "output_router_logits", "use_cache", "is_causal"),
    "position_embeddings",
}


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """What some architectures add to softmax(scale q k') v. None of birl's kernels computes it.

    cap     scores s become cap tanh(s / cap): Gemma 2, arXiv:2408.00118
    sinks   [H], one more score in each softmax of a head, without a value: gpt-oss, arXiv:2508.10925
    chunk   positions see those of their own chunk alone, position // chunk: Llama 4
    """

    cap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


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
        """The same by kernels: [T, H, D] -> [T, H * D], and log-sum-exp [T, H] where a backward pass needs it."""
        ...


@dataclass(frozen=True, slots=True)
class Tree:
    """A stretch of a packed row: `prefix` tokens, then branches that see the prefix and themselves, not each other.

    A plain sequence is a tree without branches. Example: Tree(prefix=45, branches=(12, 9)) covers 66 tokens.
    """

    prefix: int
    branches: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.prefix + sum(self.branches)

    def positions(self) -> list[int]:
        """Position of each token in its own sequence: branches all go on where the prefix ended."""
        return [*range(self.prefix), *(self.prefix + i for n in self.branches for i in range(n))]


@dataclass(frozen=True)
class Packed:
    """Attention within each tree of a packed row."""

    trees: Sequence[Tree]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    masks: dict[Any, Tensor] = field(default_factory=dict)  # made once, used by every layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        if variant is not None:
            areas = self.areas(window, variant.chunk)
            return tree_attention(query[0], key[0], value[0], areas, scale, variant.cap, variant.sinks)[None]
        if query.device.type == "cpu":
            return tree_attention(query[0], key[0], value[0], self.areas(window), scale)[None]
        if len(query) == 1 and varlen.takes(query, value) and (window is None or varlen.windows()):
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            return varlen.attend(self.cut, q, k, v, scale, window)[None]
        gqa = query.shape[1] != key.shape[1]
        outputs, start = [], 0
        for tree in self.trees:
            cut = slice(start, start + len(tree))
            start = cut.stop
            mask = self.mask(tree, window)
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, cut],
                    key[:, :, cut],
                    value[:, :, cut],
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scale,
                    enable_gqa=gqa,
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def attend_rows(
        self, layer: int, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return kernels.tree_attention(query, key, value, self.segments, scale)

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        """For layers that keep a state (`models/states.py`)."""
        return by_trees([(tree.prefix, tree.branches) for tree in self.trees], rows, step)

    @cached_property
    def segments(self) -> Tensor:
        """Each tree's prefix and branches as the kernels want them: rows (first, count, prefix's first, prefix's count,
        tree), int64. A prefix sees nothing but itself."""
        rows, start = [], 0
        for number, tree in enumerate(self.trees):
            rows.append((start, tree.prefix, start, 0, number))
            place = start + tree.prefix
            for n in tree.branches:
                rows.append((place, n, start, tree.prefix, number))
                place += n
            start = place
        return torch.tensor(rows, dtype=torch.int64).view(-1, 5)

    @cached_property
    def cut(self) -> varlen.Segments:
        """The same for `varlen_attn`; made once a batch, not once a layer."""
        return varlen.segments([(tree.prefix, tree.branches) for tree in self.trees], self.device)

    def mask(self, tree: Tree, window: int | None) -> Tensor | None:
        """Who sees whom, bool [n, n]; None where plain causal attention says the same."""
        if len(tree.branches) < 2 and (window is None or len(tree) <= window):
            return None
        if (tree, window) not in self.masks:
            self.masks[tree, window] = tree_mask(tree, window).to(self.device)
        return self.masks[tree, window]

    def areas(self, window: int | None, chunk: int | None = None) -> list[Area]:
        """Each tree with its mask as 0 and -inf."""
        result, start = [], 0
        for tree in self.trees:
            kind = tree, window, chunk, "areas"
            if kind not in self.masks:
                self.masks[kind] = bias(tree_mask(tree, window, chunk=chunk)).to(self.device)
            result.append((start, start, self.masks[kind]))
            start += len(tree)
        return result


def tree_mask(
    tree: Tree, window: int | None, first: int = 0, last: int | None = None, chunk: int | None = None
) -> Tensor:
    """mask[i, j] = token first + i may attend to token j: j is not later, and belongs to the prefix or to i's own
    branch. bool [last - first, last]; without `last` to the tree's end."""
    branch = torch.tensor(
        [-1] * tree.prefix + [b for b, n in enumerate(tree.branches) for _ in range(n)], dtype=torch.int64
    )[:last]
    order = torch.arange(len(branch))
    mask = (order[first:, None] >= order) & ((branch == -1) | (branch[first:, None] == branch))
    position = torch.tensor(tree.positions(), dtype=torch.int64)[:last]
    if window is not None:
        mask &= position[first:, None] - position < window
    if chunk is not None:
        mask &= position[first:, None] // chunk == position // chunk
    return mask


def bias(mask: Tensor) -> Tensor:
    """0 where a mask is true and -inf elsewhere, float32."""
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
    """What transformers calls. Raises `BirlError` for anything it would otherwise leave out silently."""
    name = type(module).__name__
    unknown = sorted(option for option, value in options.items() if value is not None and option not in IGNORED)
    unknown += ["dropout"] if dropout else []
    unknown += ["a mask of its own"] if attention_mask is not None else []
    unknown += [] if getattr(module, "is_causal", True) else ["later tokens are seen, too"]
    if unknown:
        raise BirlError(f"{name} wants attention that birl has no rule for: {', '.join(unknown)}.")
    if layout is None:  # a plain call, such as model(input_ids): every row is one sequence
        layout = Packed([Tree(prefix=query.shape[2])], query.device)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise BirlError(f"{name} does not say which layer it is; this architecture is not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window == UNTOLD:  # Qwen2-MoE's is in its mask alone
        sliding_window = getattr(module, "sliding_window", None)
    chunk = chunk_of(module, layer)
    if softcap is None and s_aux is None and chunk is None:
        return layout.attend(layer, query, key, value, scale, sliding_window), None
    variant = Variant(softcap, s_aux, chunk)
    return layout.attend(layer, query, key, value, scale, sliding_window, variant), None


def chunk_of(module: torch.nn.Module, layer: int) -> int | None:
    """Llama 4's chunks are in its mask alone."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return config.attention_chunk_size if layer < len(kinds) and kinds[layer] == "chunked_attention" else None


def named(config: Any, name: str = NAME) -> Any:
    """transformers' word for attention by the function of this name; a vision tower keeps its own."""
    return {"": name, "text_config": name} if "vision_config" in config.sub_configs else name


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
