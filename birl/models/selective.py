"""Mamba 1 (arXiv:2312.00752) from a state, which transformers' own scan of several tokens begins without:

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t        y_t = C_t h_t + D x_t        per channel, all of size N

is linear in h_0. The scan from zeros is transformers', a kernel where one is installed; what h_0 adds to it, and the
last state, which kernels give no gradient for, are computed at once.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from birl.models.states import MAMBA1, State


def step(mixer: Any, rows: Tensor, state: State) -> Tensor:
    """Rows [B, T, H] of B sequences behind `state`, [B, D, N] -> [B, T, H], and the state behind them."""
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
    left = steps.flip(2).cumsum(2).flip(2) - steps  # of the steps behind each token
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
    """The module of transformers that a mixer's class is of, also where FSDP has made another class of it."""
    return next(k.__module__ for k in type(mixer).__mro__ if k.__name__ in MAMBA1)
