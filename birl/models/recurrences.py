"""Recurrences that transformers computes behind a state token by token, or not at all:

    lightning   S_t = exp(-s) S_(t-1) + k_t v_t',   y_t = S_t' q_t      MiniMax, arXiv:2401.04658
    griffin     h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t             RG-LRU, arXiv:2402.19427

Each takes a layer's rows [B, T, H] of B sequences behind `state`, gives [B, T, H], and leaves the state behind them.
"""

from typing import Any

import torch
from torch import Tensor

from birl.models.states import State


def lightning(layer: Any, rows: Tensor, state: State) -> Tensor:
    """In blocks, as transformers' own from zeros, in float32. S: [B, heads, D, D]."""
    size, shape = layer.head_dim, (*rows.shape[:2], layer.num_attention_heads, -1)
    queries, keys, values = layer.act_fn(layer.qkv_proj(rows)).float().view(shape).transpose(1, 2).split(size, 3)
    kept = queries.new_zeros(*queries.shape[:2], size, size) if state.recurrent is None else state.recurrent
    blocks, n = list[Tensor](), layer.block_size
    for q, k, v in zip(queries.split(n, 2), keys.split(n, 2), values.split(n, 2), strict=True):
        n = q.shape[2]
        near = (q @ k.transpose(2, 3) * layer.diagonal_decay[:, :, :n, :n]) @ v
        blocks.append(near + (q * layer.query_decay[:, :n]) @ kept)
        kept = torch.exp(-layer.slope_rate * n) * kept + (k * layer.key_decay[:, -n:]).transpose(2, 3) @ v
    state.recurrent = kept
    x = layer.norm(torch.cat(blocks, 2).transpose(1, 2).flatten(2).to(rows.dtype))
    return layer.out_proj(torch.sigmoid(layer.output_gate(rows)) * x)


def griffin(block: Any, rows: Tensor, state: State) -> Tensor:
    """transformers keeps both states in the modules, and takes the first token's place from its position."""
    count, lru = rows.shape[1], block.rg_lru
    inputs = state.update_conv_state(block.linear_x(rows).transpose(1, 2), 0, conv_kernel_size=block.conv1d_width)
    x = block.conv_1d(inputs)[..., inputs.shape[2] - count : inputs.shape[2]].transpose(1, 2)
    places = torch.arange(count, device=rows.device).expand(len(rows), -1) + (state.recurrent is not None)
    lru.recurrent_states = state.recurrent
    x = lru(x, places)
    state.recurrent, lru.recurrent_states = lru.recurrent_states, None
    return block.linear_out(x * block.act_fn(block.linear_y(rows)))


STEPS = {"MiniMaxLightningAttention": lightning, "RecurrentGemmaRecurrentBlock": griffin}
