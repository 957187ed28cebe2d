"""Recurrent layers that transformers continues from a state only token by token, or not at all:

    lightning   S_t = exp(-s) S_(t-1) + k_t v_t',   y_t = S_t' q_t      MiniMax, arXiv:2401.04658
    griffin     h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t             RG-LRU, arXiv:2402.19427
    mamba 1     h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t,   y_t = C_t h_t + D x_t    arXiv:2312.00752
    mLSTM       C_t = f_t C_(t-1) + i_t k_t v_t',  n_t = f_t n_(t-1) + i_t k_t       xLSTM, arXiv:2405.04517
    CCA         convolved queries and keys, half of each value from the token before  Zaya, arXiv:2510.04476

Each takes a layer's inputs [B, T, H] of B sequences that continue from `state`, returns [B, T, H] and updates it.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from birl.models.states import MAMBA1, State


def lightning(layer: Any, rows: Tensor, state: State) -> Tensor:
    """Computed in blocks in float32, as transformers does from a zero state. S: [B, heads, D, D]."""
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
    """transformers keeps both states in the modules, and recognises the first token by its position."""
    count, lru = rows.shape[1], block.rg_lru
    inputs = state.update_conv_state(block.linear_x(rows).transpose(1, 2), 0, conv_kernel_size=block.conv1d_width)
    x = block.conv_1d(inputs)[..., inputs.shape[2] - count : inputs.shape[2]].transpose(1, 2)
    places = torch.arange(count, device=rows.device).expand(len(rows), -1) + (state.recurrent is not None)
    lru.recurrent_states = state.recurrent
    x = lru(x, places)
    state.recurrent, lru.recurrent_states = lru.recurrent_states, None
    return block.linear_out(x * block.act_fn(block.linear_y(rows)))


def mamba(mixer: Any, rows: Tensor, state: State) -> Tensor:
    """transformers' scan of several tokens starts from a zero state, [B, D, N]. The scan is linear in the state: the
    initial state's contribution, and the final state, which kernels give no gradient for, are added in closed form."""
    count, size, before = rows.shape[1], mixer.ssm_state_size, state.recurrent
    x, gate = mixer.in_proj(rows).transpose(1, 2).chunk(2, 1)  # [B, D, T]
    inputs = state.update_conv_state(x, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    x = mixer.act(mixer.conv1d(inputs)[..., inputs.shape[2] - count : inputs.shape[2]])
    dt, b, c = mixer.x_proj(x.transpose(1, 2)).split([mixer.time_step_rank, size, size], -1)
    if hasattr(mixer, "dt_layernorm"):
        dt, b, c = mixer.dt_layernorm(dt), mixer.b_layernorm(b), mixer.c_layernorm(c)
    dt, a = mixer.dt_proj(dt).transpose(1, 2), -torch.exp(mixer.A_log.float())
    scan = import_module(defined(mixer)).mamba_selective_scan
    y = scan(x, dt, a, b.transpose(1, 2), c.transpose(1, 2), D=mixer.D.float(), delta_softplus=True)
    steps = F.softplus(dt.float())
    left = steps.flip(2).cumsum(2).flip(2) - steps  # sum of the steps after each token
    state.recurrent = torch.einsum("bdtn,bdt,btn->bdn", decay(a, left), steps * x.float(), b.float())
    if before is not None:
        gone = decay(a, steps.cumsum(2))
        y = y + torch.einsum("bdtn,bdn,btn->bdt", gone, before, c.float())
        state.recurrent = state.recurrent + gone[:, :, -1] * before
    return mixer.out_proj((y * F.silu(gate)).transpose(1, 2).to(rows.dtype))


def decay(a: Tensor, steps: Tensor) -> Tensor:
    """A [D, N], sums of steps [B, D, T] -> [B, D, T, N]."""
    return torch.exp(a[:, None] * steps[..., None])


def defined(mixer: Any) -> str:
    """The module of transformers that defines a mixer's class, also if FSDP replaced the class by a subclass."""
    return next(k.__module__ for k in type(mixer).__mro__ if k.__name__ in MAMBA1)


def mlstm(forward: Any, mixer: Any, rows: Tensor, state: State) -> Tensor:
    """transformers' mLSTM, whose state is a matrix, a vector and a number for each head: [B, heads, K V + K + 1]."""
    keys, values = (n // mixer.config.num_heads for n in (mixer.qk_dim, mixer.v_dim))
    before = None
    if state.recurrent is not None:
        matrix, vector, number = state.recurrent.split([keys * values, keys, 1], -1)
        before = matrix.unflatten(-1, (keys, values)), vector, number
    result, (matrix, vector, number) = forward(mixer, rows, before)
    state.recurrent = torch.cat([matrix.flatten(-2), vector, number], -1)
    return result


def cca(forward: Any, mixer: Any, rows: Tensor, state: State) -> Tensor:
    """Queries, keys and values concatenated; the state has the last inputs of convolutions and delayed values."""
    return torch.cat([part.flatten(2) for part in forward(mixer, rows, state)], -1)


# wrap transformers' own forward, the first argument
AROUND = {"xLSTMLayer": mlstm, "ZayaCCAProjection": cca}
STEPS = {
    "MiniMaxLightningAttention": lightning,
    "RecurrentGemmaRecurrentBlock": griffin,
    **dict.fromkeys(MAMBA1, mamba),
}
