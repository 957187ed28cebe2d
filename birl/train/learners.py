"""The learner that a configuration asks for."""

import torch
from torch import nn

from birl.config import schema
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.lora import Lora
from birl.learner.policy import DTYPES
from birl.models.device import device_of
from birl.parallel.ranks import Ranks


def check_device(config: schema.RL | schema.Stage, device: torch.device) -> None:
    if config.optimizer.offload == "cpu" and device.type == "cpu":
        raise BirlError(
            "optimizer.offload=cpu: the weights are in CPU memory already, so there is nothing to gain. Set "
            "optimizer.offload=none."
        )


def make_learner(
    config: schema.RL | schema.Stage, model: nn.Module, ranks: Ranks | None = None, routed: bool = True
) -> Learner:
    """The learner that is trained. Its log-probs are those of the temperature that sampled, where something did.
    `routed`: what the configuration says of routers is about this model."""
    optimizer = config.optimizer
    check_device(config, device_of(model))
    return Learner(
        model,
        dtype=DTYPES[config.model.dtype],
        temperature=config.rollout.temperature if isinstance(config, schema.RL) else 1.0,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        offload=optimizer.offload == "cpu",
        lora=lora_of(config),
        ranks=ranks,
        router_aux_coef=config.learner.router_aux_coef if routed else 0.0,
        router_replay=routed and replays(config),
    )


def lora_of(config: schema.RL | schema.Stage) -> Lora | None:
    lora = config.lora
    if lora.rank == 0:
        return None
    return Lora(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), dora=lora.dora, seed=config.seed)


def replays(config: schema.RL | schema.Stage) -> bool:
    return isinstance(config, schema.RL) and config.algorithm.router_replay == "rollout"
