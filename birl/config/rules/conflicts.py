"""Combinations of values that are not allowed: a table."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from birl.config.decided import SELF, UNCLIPPED, teachers_of, weights_method
from birl.config.schema import DPO, RL, SFT, Eval, Serve, Stage, Tinker, reward_functions
from birl.hub import addressed
from birl.named import TEMPLATES, template_file


def _relative(c: RL) -> bool:
    return c.algorithm.advantage == "relative"


def _alone(c: RL) -> bool:
    return c.rollout.group_size == 1


def _masked(c: RL) -> bool:
    """Whether the importance weight against the sampling policy is the whole ratio, and bounded."""
    keys = c.algorithm
    return keys.correction == "mask" and keys.proximal == "recompute" and _updates(c) == 1


def _updates(c: RL) -> int:
    return c.algorithm.updates_per_batch * c.algorithm.passes


def _served(c: RL) -> bool:
    return any(map(addressed, teachers_of(c).values()))


def _divergence(c: RL) -> bool:
    """Whether a served teacher is compared by its top-k tokens."""
    return c.algorithm.teacher_divergence != "sampled" and _served(c)


#: configurations that have the keys: message, with {c} as the configuration -> condition
CONFLICTS: tuple[tuple[Any, dict[str, Callable[[Any], Any]]], ...] = (
    (
        object,
        {
            "model.path is empty: name a folder, a .gguf file, a hub id, or smollm2.": lambda c: (
                not c.model.path.strip()
            ),
            "model.path={c.model.path}: there is no such file.": lambda c: (
                c.model.path.endswith(".gguf") and not Path(c.model.path).is_file()
            ),
            "model.chat_template={c.model.chat_template}: there is no such file; it must be a Jinja template, or "
            f"one of {', '.join(TEMPLATES)}.": lambda c: (
                c.model.chat_template and not template_file(c.model.chat_template).is_file()
            ),
        },
    ),
    (
        Tinker,
        {
            "model.chat_template and model.tool_format: clients render texts themselves; leave both out.": lambda c: (
                c.model.chat_template or c.model.tool_format != "auto"
            ),
            "folder is empty: name one for adapters and checkpoints.": lambda c: not c.folder.strip(),
        },
    ),
    (Serve | Tinker, {"host is empty: name an address, as in host=127.0.0.1.": lambda c: not c.host.strip()}),
    (
        RL | Stage | Eval,
        {
            "data.system_prompt is set, but data.apply_chat_template=false continues the raw text, which has no "
            "system message; drop one of the two.": lambda c: c.data.system_prompt and not c.data.apply_chat_template
        },
    ),
    (
        RL | Eval,
        {
            "data.max_prompt_tokens={c.data.max_prompt_tokens}: leaves no room for an answer in "
            "model.max_length={c.model.max_length}; lower "
            "it.": lambda c: 0 < c.model.max_length <= c.data.max_prompt_tokens,
            "validation.k is empty: name at least one k, as in validation.k=[1].": lambda c: not c.validation.k,
            "validation.samples={c.validation.samples}: greedy decoding (validation.temperature=0) gives the same "
            "answer each time; set validation.temperature=1, or "
            "validation.samples=1.": lambda c: c.validation.temperature == 0 and c.validation.samples > 1,
            "validation.max_tokens={c.validation.max_tokens}: leaves no room for a prompt in "
            "model.max_length={c.model.max_length}.": lambda c: 0 < c.model.max_length <= c.validation.max_tokens,
            "env.kind is empty: name an environment, or single_turn.": lambda c: not c.env.kind,
            "reward.functions is empty, but single_turn in env.parts has no reward of its own; name a function, as in "
            "reward=math.": lambda c: (
                c.env.kind == "mixture"
                and "single_turn" in str(c.env.options.get("parts", ""))
                and not reward_functions(c)
            ),
            "reward.functions=model: needs reward.model=FOLDER (see `birl checkpoints RUN export`).": lambda c: (
                "model" in reward_functions(c) and not c.reward.model
            ),
            "reward.functions=judge: needs the address of a judge, as in "
            "reward.judge=http://localhost:8000/v1#MODEL.": lambda c: (
                "judge" in reward_functions(c) and not c.reward.judge
            ),
            "reward.judge={c.reward.judge}: give the address of each judge, as in "
            "reward.judge=http://localhost:8000/v1#MODEL.": lambda c: (
                "judge" in reward_functions(c) and not all(map(addressed, c.reward.judge))
            ),
            "reward.judge={c.reward.judge}: the same judge is named twice; name each judge once.": lambda c: (
                len(set(c.reward.judge)) < len(c.reward.judge)
            ),
            "reward.judge_mode=pairs: a pair has two orders, so reward.judge_rounds={c.reward.judge_rounds} would "
            "repeat requests; set 1 or 2.": lambda c: c.reward.judge_mode == "pairs" and c.reward.judge_rounds > 2,
            "reward.judge_prompt={c.reward.judge_prompt}: there is no such file.": lambda c: (
                "judge" in reward_functions(c)
                and c.reward.judge_prompt
                and not Path(c.reward.judge_prompt).expanduser().is_file()
            ),
            "sandbox.seconds={c.sandbox.seconds:g}: is longer than the limit of all tests, "
            "sandbox.total_seconds={c.sandbox.total_seconds:g}; lower the first or raise the "
            "second.": lambda c: "code" in reward_functions(c) and c.sandbox.seconds > c.sandbox.total_seconds,
            "engine.python={c.engine.python}: is not a Python interpreter; name the executable, as in "
            ".venv/bin/python.": lambda c: (
                c.engine.python and not (Path(c.engine.python).is_file() and os.access(c.engine.python, os.X_OK))
            ),
        },
    ),
    (
        RL | Stage | Tinker,
        {
            "model.device={c.model.device}: is a single GPU, but each of the {c.parallel.size} processes needs its "
            "own; set model.device=cuda.": lambda c: c.model.device[-1:].isdigit() and c.parallel.size > 1
        },
    ),
    (
        RL | Stage,
        {
            "data.validation_split={c.data.validation_split:g}: data.validation already names a held-out set; remove "
            "one of the two.": lambda c: c.data.validation_split and c.data.validation,
            "parallel.ep={c.parallel.ep}: must divide parallel.fsdp x parallel.cp = "
            "{c.parallel.fsdp} x {c.parallel.cp} = {c.parallel.fsdp_cp}, the processes that the"
            " experts are split over.": lambda c: c.parallel.ep > 1 and c.parallel.fsdp * c.parallel.cp % c.parallel.ep,
            "parallel.ep={c.parallel.ep}: cannot be combined with parallel.tp={c.parallel.tp}; set one of them to"
            " 1.": lambda c: c.parallel.ep > 1 and c.parallel.tp > 1,
            "lora.targets is empty, so nothing would be trained; set lora.targets=[all-linear].": lambda c: (
                c.lora.rank and not c.lora.targets
            ),
            "optimizer.kind=muon updates hidden matrices, but lora.rank={c.lora.rank} trains only LoRA matrices; "
            "set optimizer.kind=adamw, or lora.rank=0.": lambda c: c.lora.rank and c.optimizer.kind == "muon",
            "lora.quantize={c.lora.quantize}: a quantised weight cannot be split over processes; set parallel.fsdp=1, "
            "parallel.cp=1 and parallel.tp=1 (parallel.ddp may be more), or lora.quantize=none.": lambda c: (
                c.lora.rank and c.lora.quantize != "none" and c.parallel.fsdp * c.parallel.cp * c.parallel.tp > 1
            ),
            "lora.quantize={c.lora.quantize}: optimizer.offload=cpu would save little memory; set "
            "optimizer.offload=none.": lambda c: (
                c.lora.rank and c.lora.quantize != "none" and c.optimizer.offload == "cpu"
            ),
            "run={c.run!r}: is not a valid folder name; leave it empty for a generated one.": lambda c: (
                c.run and (not c.run.strip() or "\0" in c.run)
            ),
            "run={c.run}: is a file or a broken link; name a folder.": lambda c: (
                "\0" not in c.run and not (p := Path(c.run)).is_dir() and (p.exists() or p.is_symlink())
            ),
            "resume is empty: use auto, never, or the folder of a checkpoint or run.": lambda c: not c.resume,
            "checkpoint.store={c.checkpoint.store}: expected a URL, as in s3://bucket/prefix.": lambda c: (
                c.checkpoint.store and not c.checkpoint.store.partition("://")[2].strip("/")
            ),
            "run={c.run}: is the root of the file system; name a folder in it.": lambda c: (
                c.run and "\0" not in c.run and not Path(c.run).absolute().parts[1:]
            ),
        },
    ),
    (
        Stage,
        {
            f"data.{name} is empty: name a column.": lambda c, name=name: getattr(c.data, name, "-") == ""
            for name in ("chosen_column", "rejected_column")
        },
    ),
    (
        SFT,
        {
            "data.train_on is empty: name roles, as in data.train_on=[assistant], or data.train_on=[all].": lambda c: (
                not c.data.train_on
            ),
            "distill.teacher={c.distill.teacher}: must be a model's folder, as servers do not return the distribution "
            "over all tokens.": lambda c: "://" in c.distill.teacher,
            "distill.teacher={c.distill.teacher}: cannot be combined with parallel.tp={c.parallel.tp}, which splits "
            "the vocabulary; set parallel.tp=1, and use parallel.fsdp "
            "instead.": lambda c: c.distill.teacher and c.parallel.tp > 1,
        },
    ),
    (
        RL,
        {
            "rollout.temperature=0: greedy answers are all equal, so all advantages would be 0; use 1 "
            "(validation.temperature may be 0).": lambda c: c.rollout.temperature == 0,
            "rollout.stop: an empty string would end every answer at once; remove it.": lambda c: "" in c.rollout.stop,
            "rollout.stop: a backslash and a letter is not a line break; in bash write "
            "rollout.stop=$'\\n'.": lambda c: any(text in ("\\n", "\\n\\n", "\\t") for text in c.rollout.stop),
            "algorithm.updates_per_batch={c.algorithm.updates_per_batch}: a batch of "
            "rollout.prompts={c.rollout.prompts} groups cannot be split into more parts than groups; lower it to "
            "{c.rollout.prompts}.": lambda c: c.algorithm.updates_per_batch > c.rollout.prompts,
            "rollout.max_tokens={c.rollout.max_tokens}: leaves no room for a prompt in "
            "model.max_length={c.model.max_length}; lower "
            "it.": lambda c: 0 < c.model.max_length <= c.rollout.max_tokens,
            "env.sampling=agent: the log-probs that are trained are those of rollout.temperature, "
            "top_p, top_k and min_p, so answers must be drawn with them. Leave env.sampling=run; "
            "`birl eval` can use agent.": lambda c: c.env.sampling == "agent" and c.env.kind != "single_turn",
            "algorithm.credit=turn: does not support algorithm.advantage={c.algorithm.advantage}; set "
            "relative.": lambda c: (
                c.algorithm.credit == "turn" and not _relative(c) and ":" not in c.algorithm.advantage
            ),
            "algorithm.credit=turn: the greedy episode has other turns; set another algorithm.baseline.": lambda c: (
                c.algorithm.credit == "turn" and c.algorithm.baseline == "greedy"
            ),
            "algorithm.credit=turn: does not support the KL in the reward; set algorithm.kl_in=loss.": lambda c: (
                c.algorithm.credit == "turn" and c.algorithm.kl_coef > 0 and c.algorithm.kl_in == "reward"
            ),
            "rollout.group_size=1: the mean of one reward is that reward, so every advantage would be 0; set "
            "rollout.group_size=8, or algorithm.baseline=none.": lambda c: (
                _alone(c) and _relative(c) and c.algorithm.baseline in ("group", "leave_one_out", "optimal")
            ),
            "rollout.group_size=1: algorithm.scale_rewards=group divides by the standard deviation of a group of "
            "one, which does not exist; set rollout.group_size=8, or algorithm.scale_rewards=none.": lambda c: (
                _alone(c) and _relative(c) and c.algorithm.scale_rewards == "group"
            ),
            "algorithm.baseline={c.algorithm.baseline}: gives a group of equal rewards an advantage, but "
            "algorithm.scale_rewards=group has no standard deviation to divide it by; set "
            "algorithm.baseline=group, or algorithm.scale_rewards=batch.": lambda c: (
                _relative(c)
                and not _alone(c)
                and c.algorithm.scale_rewards == "group"
                and c.algorithm.baseline in ("batch", "greedy", "none")
            ),
            "rollout.group_size=1: algorithm.advantage={c.algorithm.advantage} compares the answers to a prompt; "
            "set rollout.group_size=8.": lambda c: _alone(c) and c.algorithm.advantage in ("gdpo", "best_and_worst"),
            "algorithm.dynamic_sampling=true: drops groups whose rewards are all equal, but with "
            "algorithm.baseline=none these have a gradient; set algorithm.baseline=group or "
            "algorithm.dynamic_sampling=false.": lambda c: (
                c.algorithm.dynamic_sampling and _relative(c) and c.algorithm.baseline == "none"
            ),
            "algorithm.dynamic_sampling=true: a group of one always has equal rewards; set "
            "rollout.group_size=8.": lambda c: (
                c.algorithm.dynamic_sampling and _alone(c) and not (_relative(c) and c.algorithm.baseline == "none")
            ),
            "optimizer.schedule={c.optimizer.schedule}: needs the number of steps, which with "
            "algorithm.dynamic_sampling=true does not follow from epochs; set "
            "steps.": lambda c: c.algorithm.dynamic_sampling and c.optimizer.schedule != "constant" and not c.steps,
            "algorithm.max_refill=0: algorithm.dynamic_sampling=true could not replace any group; set "
            "algorithm.max_refill=4.": lambda c: c.algorithm.dynamic_sampling and c.algorithm.max_refill == 0,
            "algorithm.kl_target: needs the KL in the reward; set algorithm.kl_in=reward, or "
            "algorithm.kl_target=0.": lambda c: (
                c.algorithm.kl_target > 0 and c.algorithm.kl_coef > 0 and c.algorithm.kl_in == "loss"
            ),
            "algorithm.kl_horizon={c.algorithm.kl_horizon}: too short for {c.episodes} episodes a step; set "
            "{c.episodes} or more.": lambda c: c.algorithm.kl_target > 0 and c.algorithm.kl_horizon <= 0.2 * c.episodes,
            "algorithm.pass_k={c.algorithm.pass_k}: with rollout.group_size={c.rollout.group_size} "
            "there is only one set of k answers; set a smaller algorithm.pass_k or "
            "a larger rollout.group_size.": lambda c: (
                c.algorithm.advantage == "pass_at_k" and c.algorithm.pass_k >= c.rollout.group_size
            ),
            "algorithm.advantage={c.algorithm.advantage}: does not use the penalties of algorithm.overlong_buffer, "
            "algorithm.length_penalty or algorithm.kl_in=reward; remove them, or set another advantage.": lambda c: (
                c.algorithm.advantage in ("gdpo", "pass_at_k", "zero")
                and (
                    c.algorithm.overlong_buffer
                    or c.algorithm.length_penalty
                    or (c.algorithm.kl_coef > 0 and c.algorithm.kl_in == "reward")
                )
            ),
            "algorithm.advantage=zero: has no gradient without algorithm.teacher; name a model.": lambda c: (
                c.algorithm.advantage == "zero" and not teachers_of(c)
            ),
            "algorithm.teachers={c.algorithm.teachers}: write each as name=model, every name once, as in "
            "[math=folder,code=other_folder].": lambda c: len(teachers_of(c)) < len(c.algorithm.teachers),
            "algorithm.teachers={c.algorithm.teachers}: algorithm.teacher={c.algorithm.teacher} is set, too; set "
            "only one of them.": lambda c: c.algorithm.teachers and c.algorithm.teacher,
            "algorithm.teachers={c.algorithm.teachers}: self cannot be one of several; set algorithm.teacher=self "
            "alone.": lambda c: c.algorithm.teachers and SELF in teachers_of(c).values(),
            "algorithm.teachers={c.algorithm.teachers}: servers return only top-k tokens and cannot be mixed with "
            "local models; name only folders, only addresses, or set algorithm.teacher_divergence=sampled.": lambda c: (
                _divergence(c) and not all(map(addressed, teachers_of(c).values()))
            ),
            "algorithm.teacher_divergence={c.algorithm.teacher_divergence}: a served teacher does not return the "
            "distribution over all tokens; set algorithm.teacher_top_k=20 (for vLLM at most its --max-logprobs), "
            "algorithm.teacher_divergence=sampled, or name a model's folder as "
            "algorithm.teacher.": lambda c: _divergence(c) and not c.algorithm.teacher_top_k,
            "rollout.temperature={c.rollout.temperature:g}: a served teacher returns log-probs at temperature 1, "
            "which cannot be compared with the policy's at another; set 1, or name a model's folder "
            "as algorithm.teacher.": lambda c: _served(c) and c.rollout.temperature != 1,
            "algorithm.teacher_divergence={c.algorithm.teacher_divergence}: a served teacher returns tokens of whole "
            "rows, but parallel.cp={c.parallel.cp} splits them; set parallel.cp=1, and use parallel.fsdp "
            "instead.": lambda c: _divergence(c) and c.parallel.cp > 1,
            "algorithm.teacher_divergence={c.algorithm.teacher_divergence}: cannot be combined with "
            "parallel.tp={c.parallel.tp}, which splits the vocabulary; set parallel.tp=1, and use parallel.fsdp "
            "instead.": lambda c: c.algorithm.teacher_divergence != "sampled" and teachers_of(c) and c.parallel.tp > 1,
            "algorithm.observation_coef={c.algorithm.observation_coef:g}: cannot be combined with "
            "algorithm.teacher_divergence={c.algorithm.teacher_divergence}; set algorithm.observation_coef=0, or "
            "algorithm.teacher_divergence=sampled.": lambda c: (
                c.algorithm.observation_coef > 0 and teachers_of(c) and c.algorithm.teacher_divergence != "sampled"
            ),
            "algorithm.observation_coef={c.algorithm.observation_coef:g}: env=single_turn has no observations; set "
            "algorithm.observation_coef=0, or another "
            "env.": lambda c: c.algorithm.observation_coef > 0 and c.env.kind == "single_turn",
            "algorithm.teacher=self: has the same prompt as the policy, so there is nothing to learn from it; add text "
            "with algorithm.hint, as in ['A right answer: "
            "{{answer}}'].": lambda c: c.algorithm.teacher == SELF and not c.algorithm.hint,
            "algorithm.hint={c.algorithm.hint}: each text needs a column, sibling or feedback in braces, as in "
            "'A right answer: {{answer}}'.": lambda c: not all(re.search(r"\{\w+\}", t) for t in c.algorithm.hint),
            "algorithm.hint: a hint makes the teacher's prompt longer, and parallel.cp={c.parallel.cp} would split it "
            "differently; set parallel.cp=1, and use parallel.fsdp instead.": lambda c: (
                c.algorithm.hint and c.algorithm.teacher_divergence != "sampled" and c.parallel.cp > 1
            ),
            "algorithm.router_replay=rollout: the recorded experts are those of the prompt without a hint; with "
            "algorithm.teacher=self set algorithm.router_replay=none.": lambda c: (
                c.algorithm.router_replay == "rollout" and c.algorithm.teacher == SELF
            ),
            "algorithm.mask_truncated=true: has no effect because rollout.truncated=drop drops those answers; use "
            "one.": lambda c: c.algorithm.mask_truncated and c.rollout.truncated == "drop",
            "algorithm.surrogate=reinforce: has no importance ratio, so only the first update of a batch would be "
            "correct; set algorithm.updates_per_batch=1 and algorithm.passes=1, or another "
            "surrogate.": lambda c: c.algorithm.surrogate == "reinforce" and _updates(c) > 1,
            "algorithm.surrogate={c.algorithm.surrogate}: is not bounded, and "
            "rollout.max_staleness={c.rollout.max_staleness} trains on answers of older weights; set "
            "algorithm.surrogate=clip or another bounded one.": lambda c: (
                c.algorithm.surrogate in UNCLIPPED
                and c.rollout.max_staleness > 0
                and not (c.algorithm.surrogate == "importance" and (c.algorithm.second_moment > 0 or _masked(c)))
            ),
            "algorithm.dual_clip={c.algorithm.dual_clip:g}: must be above 1, as in 3, or 0 for none.": lambda c: (
                0 < c.algorithm.dual_clip <= 1
            ),
            "algorithm.correction_low is above algorithm.correction_high, so all tokens would be masked.": lambda c: (
                c.algorithm.correction_low > c.algorithm.correction_high
            ),
            "algorithm.surrogate=online_dpo and algorithm.advantage=best_and_worst belong together: set both, or "
            "algorithm=online_dpo.": lambda c: (
                (c.algorithm.surrogate == "online_dpo") != (c.algorithm.advantage == "best_and_worst")
            ),
            "algorithm.surrogate=online_dpo: has one loss per pair; set algorithm.denominator=sequence.": lambda c: (
                c.algorithm.surrogate == "online_dpo" and c.algorithm.denominator != "sequence"
            ),
            "weights.method=checkpoint: restarts servers, which is not possible with engine.attach; "
            "set reload.": lambda c: c.engine.attach and weights_method(c) == "checkpoint",
            "weights.method=nccl: NCCL needs other GPUs than the learner's, but with engine.sleep=true servers of "
            "{c.engine.kind} share them; set "
            "shared.": lambda c: weights_method(c) == "nccl" and c.engine.sleep and c.engine.kind in ("vllm", "sglang"),
            "weights.method=nccl: SGLang supports it only with tensor parallelism; "
            "engine.pipeline_parallel={c.engine.pipeline_parallel} needs reload or shared.": lambda c: (
                weights_method(c) == "nccl" and c.engine.kind == "sglang" and c.engine.pipeline_parallel > 1
            ),
            "engine.sleep=true: servers that sleep while the learner trains cannot sample meanwhile, which "
            "rollout.max_staleness={c.rollout.max_staleness} needs; set only one of "
            "them.": lambda c: c.engine.sleep and c.rollout.max_staleness > 0,
            "debug.replay: samples in this process or not at all; set engine.kind=embedded.": lambda c: (
                c.debug.replay and c.engine.kind != "embedded"
            ),
            "debug.only_rollout=true: a replay does not sample; set only one of them.": lambda c: (
                c.debug.replay and c.debug.only_rollout
            ),
            "debug.replay={c.debug.replay}: is the folder of this run; name another folder with run=...": lambda c: (
                c.debug.replay and Path(c.debug.replay) == Path(c.run)
            ),
            "algorithm.router_replay={c.algorithm.router_replay}: only engine.kind=embedded reports the experts of "
            "each token, not engine.kind={c.engine.kind}.": lambda c: (
                c.algorithm.router_replay != "none" and c.engine.kind != "embedded"
            ),
            "algorithm.router_replay={c.algorithm.router_replay}: a record holds no routes; "
            "debug.replay={c.debug.replay} needs "
            "router_replay=none.": lambda c: c.algorithm.router_replay != "none" and c.debug.replay,
            "algorithm.router_replay={c.algorithm.router_replay}: track.record=true could not be replayed, as a "
            "record holds no routes; use one.": lambda c: c.algorithm.router_replay != "none" and c.track.record,
        },
    ),
    (
        DPO,
        {
            "preference.loss=robust: equals dpo if preference.label_smoothing=0; set it, as in 0.1.": lambda c: (
                c.preference.loss == "robust" and c.preference.label_smoothing == 0
            ),
            "preference.desirable_weight=0 and preference.undesirable_weight=0: nothing would be trained.": lambda c: (
                c.preference.loss == "kto" and not (c.preference.desirable_weight or c.preference.undesirable_weight)
            ),
            "batch_size=1: preference.loss=kto compares rows of a batch with one another; set 2 or more.": lambda c: (
                c.preference.loss == "kto" and c.batch_size == 1
            ),
            "preference.reference=precomputed: preference.loss=kto needs the reference on other pairs of prompt "
            "and answer in every step; set preference.reference=live.": lambda c: (
                c.preference.loss == "kto" and c.preference.reference == "precomputed"
            ),
        },
    ),
    (Eval, {"output={c.output}: is a folder; name a JSON file.": lambda c: c.output and Path(c.output).is_dir()}),
)
