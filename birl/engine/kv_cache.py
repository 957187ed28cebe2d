"""Keys and values of the running sequences: for each layer one tensor [slots, K, length, D], grown as needed."""

import torch
from torch import Tensor

STEP = 64  # lengths grow in steps of this


class KVCache:
    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = [torch.empty(0, kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty_like(k) for k in self.keys]

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    def reserve(self, slots: int, length: int) -> None:
        """Make the rectangle at least slots x length; what is in it stays. One layer at a time, to bound the peak."""
        have_slots, _, have_length, _ = self.keys[0].shape
        if slots <= have_slots and length <= have_length:
            return
        slots, length = max(slots, have_slots), max(-(-length // STEP) * STEP, have_length)
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                # zeros, not empty: masked places still meet a probability of 0, and 0 * NaN would be NaN
                new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
                new[:have_slots, :, :have_length] = old
                store[layer] = new

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """The first n places of each slot: keys and values [K, n, D], the same for all slots."""
        self.keys[layer][slots, :, : keys.shape[1]] = keys
        self.values[layer][slots, :, : values.shape[1]] = values

    def move(self, source: int, target: int, length: int) -> None:
        for store in (self.keys, self.values):
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = old.new_empty(0, old.shape[1], 0, old.shape[3])
