"""Build the learner of a configuration, its teachers and other models."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from birl.config import schema
from birl.config.decided import SELF, teachers_of
from birl.errors import BirlError
from birl.hub import addressed
from birl.learner.export import resolved
from birl.learner.learner import Learner, Teacher
from birl.learner.lora import Lora
from birl.learner.policy import DTYPES, Policy
from birl.models.device import device_of
from birl.models.heads import head
from birl.models.load import load_model, load_reward_model, load_tokenizer, score_weight, skeleton
from birl.models.slices import sketched, sketched_reward_model
from birl.models.vision import family_of, give, pictures_of
from birl.parallel.ranks import Ranks


def check_device(config: schema.RL | schema.Stage, device: torch.device) -> None:
    if config.optimizer.offload == "cpu" and device.type == "cpu":
        raise BirlError(
            "optimizer.offload=cpu: the weights are in CPU memory already, so there is nothing to gain. Set "
            "optimizer.offload=none."
        )


def make_learner(
    config: schema.RL | schema.Stage,
    model: nn.Module,
    ranks: Ranks | None = None,
    routed: bool = True,
    teacher: Teacher | None = None,
) -> Learner:
    """Return the trained learner. In RL its log-probs are at the sampling temperature. `routed`: the configuration's
    settings of routers apply to this model."""
    optimizer = config.optimizer
    check_device(config, device_of(model))
    return Learner(
        model,
        dtype=DTYPES[config.model.dtype],
        temperature=config.rollout.temperature if isinstance(config, schema.RL) else 1.0,
        optimizer=optimizer.kind,
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
        teacher=teacher,
    )


def lora_of(config: schema.RL | schema.Stage) -> Lora | None:
    lora = config.lora
    if lora.rank == 0:
        return None
    policies, past = (tuple(config.policies), config.league.kept) if isinstance(config, schema.RL) else ((), 0)
    return Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(lora.targets),
        dora=lora.dora,
        seed=config.seed,
        policies=policies if len(policies) > 1 or past else (),  # a single one is merged into the weights
        past=past,
    )


def replays(config: schema.RL | schema.Stage) -> bool:
    return isinstance(config, schema.RL) and config.algorithm.router_replay == "rollout"


def check_split(config: schema.RL | schema.Stage, folder: Path) -> None:
    """Check before loading weights that the model of a folder, and its rows, can be split over the ranks. Raises
    `BirlError`."""
    if config.parallel.tp * config.parallel.cp == 1:
        return
    from birl.parallel import context, tensor
    from birl.parallel.grid import grid_of

    model = skeleton(folder, pictures=config.model.pictures)
    if config.parallel.tp > 1:
        tensor.check(model, config.parallel.tp)
    context.check_heads(model, Ranks(grid_of(config)))


def own_teacher(config: schema.RL, policy: Policy, ranks: Ranks) -> Learner | None:
    """Return the teacher if algorithm.teacher=self, before the learner is made: its initial weights, or the average of
    its weights, which has no optimizer state. None if there is no such teacher."""
    keys = config.algorithm
    if keys.teacher != SELF or keys.teacher_rate == 1:
        return None
    if keys.teacher_rate == 0:
        return frozen(config, deepcopy(policy.model), ranks)
    result = make_learner(config, deepcopy(policy.model), ranks, routed=False)
    result.optimizer.state.clear()
    return result


def frozen(config: schema.RL | schema.SFT, model: nn.Module, ranks: Ranks) -> Learner:
    """Return a frozen learner, which only computes; in RL log-probs are at the sampling temperature."""
    temperature = config.rollout.temperature if isinstance(config, schema.RL) else 1.0
    dtype = DTYPES[config.model.dtype]
    return Learner(model, dtype=dtype, temperature=temperature, trainable=False, ranks=ranks)


def distilled(
    config: schema.RL | schema.SFT, policy: Policy, ranks: Ranks, own: Learner | None = None
) -> Teacher | None:
    """Return the comparison of learner and teacher over the vocabulary; None if there is none. `own`: the teacher of
    algorithm.teacher=self. Raises `BirlError`."""
    if isinstance(config, schema.RL):
        keys, temperature, paths = config.algorithm, config.rollout.temperature, teachers_of(config)
        name, beta, top_k = keys.teacher_divergence, keys.teacher_beta, keys.teacher_top_k
    else:
        keys, temperature, paths = config.distill, 1.0, {"": config.distill.teacher} if config.distill.teacher else {}
        name, beta, top_k = keys.divergence, keys.beta, keys.top_k
    if not paths or name == "sampled":
        return None
    from birl.algorithms.divergence import divergence
    from birl.learner.distillation import Distillation

    teachers = local_teachers(config, paths, policy, ranks, own)
    most = "algorithm.teacher_top_k" if isinstance(config, schema.RL) else "distill.top_k"
    vocab = min(head(m).weight.shape[0] for m in (*(t.model for t in teachers.values()), policy.model))
    if top_k >= vocab:
        raise BirlError(f"{most}={top_k}: learner and teacher have {vocab} tokens; set fewer, or 0 for all of them.")
    by = divergence(name, beta)
    return Distillation(teachers=teachers, student=policy.model, function=by, top_k=top_k, temperature=temperature)


def local_teachers(
    config: schema.RL | schema.SFT, paths: Mapping[str, str], policy: Policy, ranks: Ranks, own: Learner | None
) -> dict[str, Learner]:
    """Teachers that are not served, by name. Raises `BirlError`."""
    key = "distill.teacher" if isinstance(config, schema.SFT) else "algorithm.teacher" + "s" * ("" not in paths)
    known: dict[str, Learner] = {} if own is None else {SELF: own}
    for path in paths.values():
        if not addressed(path) and path not in known:
            known[path] = frozen(config, other_model(config, path, policy, key, ranks), ranks)
    return {name: known[path] for name, path in paths.items() if path in known}


def other_model(config: schema.RL | schema.SFT, path: str, policy: Policy, key: str, ranks: Ranks) -> nn.Module:
    """Load a model with the policy's vocabulary: a teacher, or the model of critic.path, with its score head if its
    folder has one. Raises `BirlError`."""
    folder = resolved(path, key)
    theirs, own = load_tokenizer(folder).get_vocab(), policy.tokenizer.get_vocab()
    if theirs != own:
        number = min(set(theirs.values()) ^ set(own.values()) | {own[w] for w in own if theirs.get(w) != own[w]})
        words = [next((repr(w) for w, n in v.items() if n == number), "none") for v in (theirs, own)]
        raise BirlError(
            f"{key}={path}: has another vocabulary than model.path={config.model.path}, so its tokens mean something "
            f"else: token {number} is {words[0]} there, and {words[1]} here. Take a model of the same family."
        )
    check_split(config, folder)
    scores = key == "critic.path" and any(score_weight(file) is not None for file in folder.glob("*.safetensors"))
    device, sees = device_of(policy.model), config.model.pictures
    if ranks.sharded:
        model = sketched_reward_model(folder, device) if scores else sketched(folder, device, pictures=sees)
    else:
        model = (load_reward_model(folder) if scores else load_model(folder, pictures=sees)).to(device)
    if family_of(model) is not None:
        give(model, pictures_of(policy.model), frozen=config.model.freeze_vision)
    return model
