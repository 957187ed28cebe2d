"""The one attention function, registered with transformers as "birl": training, prefill and decoding run through it.

transformers calls it once a layer with whatever `layout` was passed to the model's forward:

    Packed   many sequences behind one another in a single row [1, T]; each may be a tree: a prefix (the prompt) that
             several branches (its answers) share, computed once and attended to by all
    Decode   one new token for each running sequence [1, B]; keys and values live in a cache

so nothing is read from globals, no padding exists, and no mask of transformers is used (it would be wrong: with
`position_ids` that restart, transformers packs silently wrongly unless `use_cache=False`).

Shapes: H query heads, K key heads, G = H / K queries for each key head, D head size, T packed tokens, B sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from birl.errors import BirlError
from birl.models.tree_attention import tree_attention

NAME = "birl"
IGNORED = {"position_ids", "cache_position", "output_attentions", "use_cache", "is_causal", "position_embeddings"}


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
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
    """Attention within each tree of a packed row. `store` receives each layer's keys and values [K, T, D] (prefill)."""

    trees: Sequence[Tree]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Callable[[int, Tensor, Tensor], None] | None = None
    masks: dict[tuple[Tree, int | None], Tensor] = field(default_factory=dict)  # made once, used by every layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self.store is not None:
            self.store(layer, key[0], value[0])
        if query.device.type == "cpu":
            biases = [self.bias(tree, window) for tree in self.trees]
            return tree_attention(query[0], key[0], value[0], biases, scale)[None]
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

    def mask(self, tree: Tree, window: int | None) -> Tensor | None:
        """Who sees whom, bool [n, n]; None where plain causal attention says the same."""
        if len(tree.branches) < 2 and (window is None or len(tree) <= window):
            return None
        if (tree, window) not in self.masks:
            self.masks[tree, window] = tree_mask(tree, window).to(self.device)
        return self.masks[tree, window]

    def bias(self, tree: Tree, window: int | None) -> Tensor:
        """The same as 0 and -inf, float32 [n, n]."""
        if (tree, window) not in self.masks:
            hidden = ~tree_mask(tree, window)
            self.masks[tree, window] = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return self.masks[tree, window]


def tree_mask(tree: Tree, window: int | None) -> Tensor:
    """mask[i, j] = token i may attend to token j: j is not later, and belongs to the prefix or to i's own branch."""
    branch = torch.tensor([-1] * tree.prefix + [b for b, n in enumerate(tree.branches) for _ in range(n)])
    order = torch.arange(len(tree))
    mask = (order[:, None] >= order) & ((branch == -1) | (branch[:, None] == branch))
    if window is not None:
        position = torch.tensor(tree.positions())
        mask &= position[:, None] - position < window
    return mask


@dataclass(frozen=True)
class Decode:
    """One token for each of the first B slots of a cache. `positions` [B] says where each goes; it sees everything
    before it.

    The queries of one key head are given to the kernel as if they were G consecutive queries [B, K, G, D]: nothing is
    repeated, and on CPU this is two to three times faster than one-token attention with repeated heads.
    """

    keys: list[Tensor]  # one for each layer: [slots, K, capacity, D]
    values: list[Tensor]
    positions: Tensor
    length: int  # longest sequence, the new token included
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        batch, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
        keys, values = self.keys[layer], self.values[layer]
        slots = torch.arange(batch, device=query.device)
        keys[slots, :, self.positions] = key[0].transpose(0, 1)
        values[slots, :, self.positions] = value[0].transpose(0, 1)
        output = F.scaled_dot_product_attention(
            query[0].transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, -1),
            keys[:batch, :, : self.length],
            values[:batch, :, : self.length],
            attn_mask=self.mask(window, query.dtype),
            scale=scale,
        )
        return output.reshape(1, batch, heads, -1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a sequence has a token, -inf elsewhere: [B, 1, 1, length]."""
        if window not in self.masks:
            column = torch.arange(self.length, device=self.positions.device)
            hidden = column > self.positions[:, None]
            if window is not None:
                hidden |= column <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self.masks[window] = mask[:, None, None]
        return self.masks[window]


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
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. Raises `BirlError` for anything it would otherwise leave out silently."""
    unknown = sorted(name for name, value in options.items() if value is not None and name not in IGNORED)
    if unknown or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        raise BirlError(
            f"{type(module).__name__} wants attention that birl does not implement "
            f"({', '.join(unknown) or 'dropout or a mask'}); this architecture is not supported."
        )
    if layout is None:  # a plain call, such as model(input_ids): every row is one sequence
        layout = Packed([Tree(prefix=query.shape[2])])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scale, sliding_window), None  # pyright: ignore


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
