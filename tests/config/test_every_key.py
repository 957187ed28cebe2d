"""Every key does something: changing it alone changes what a real, tiny run does, or the run is refused and says why.

A case is a key's other value and a witness: what it shows must differ between the run without and with that value, and
must not differ between two equal runs. A new key without a case fails.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from birl.config.keys import documentation
from birl.config.schema import RL, Eval
from birl.parallel.ranks import AXES
from birl.track.sink import KINDS
from tests.config import witnesses as see
from tests.config.observed import Bench, Case, opened_bench, prove
from tests.config.witnesses import advantages, answers, first_prompt, last, lengths, rewards, tasks, weights

WORLD = "env.kind=worlds.py:Thrice rollout.stop=[e,a,i,o,n] rollout.max_tokens=60"
WORLD_EVAL = "env.kind=worlds.py:Thrice validation.max_tokens=100 validation.temperature=1 seed=1"
AGENT = "env.kind=worlds.py:hot"
TOOLS = "model.chat_template=tools.jinja model.tool_format=hermes"
SERVED = f"{TOOLS} env.mcp=[./server.py] env.mcp_sandbox=none"
ENVIRONMENT: dict[str, Case] = {
    "env.kind": Case("worlds.py:Thrice", first_prompt),
    "env.options": Case("word", refused=r"written as env\.NAME=value"),
    "env.max_turns": Case("2", see.turns, {2}, WORLD),
    "env.cut_turn": Case("continue", see.turns, {3}, WORLD + " rollout.max_tokens=1"),
    "env.mcp": Case("[./server.py]", first_prompt, under=TOOLS),
    "env.mcp_longest": Case("7", first_prompt, under=SERVED),
    "env.mcp_timeout": Case("1e-9", refused=r"it did not begin within 1e-09 s \(env\.mcp_timeout\)", under=SERVED),
    "env.mcp_sandbox": Case("none", first_prompt, under=SERVED.removesuffix(" env.mcp_sandbox=none")),
}

#: real runs of several processes: tests/parallel/test_runs.py
PARALLEL = {
    **{f"parallel.{axis}": Case("2", refused=f"{axis}=2 makes 2 ranks, but 1 were started") for axis in AXES},
    "parallel.tp": Case("2", refused=r"parallel\.tp=2 does not divide the 1 key/value heads"),
    "parallel.timeout": Case("5", refused="there is only one process"),
    "parallel.sequence": Case("false", refused=r"parallel\.sequence=false: has no effect because parallel\.tp=1"),
}

#: what each does to a model that sees: tests/text/test_pictures.py, tests/models/test_vision.py
SIGHT = {
    **{"pictures": "true", "freeze_vision": "true", "max_pixels": "9", "max_picture_mb": "1", "max_pictures": "2"},
    "picture_hosts": "[example.org]",
}
MODEL = {
    "model.path": Case("other", answers),
    "model.dtype": Case("bfloat16", lambda s: s.parts.rollout.engine.runner.model.dtype, torch.bfloat16),
    "model.device": Case("cuda", refused=r"model\.device=cuda: PyTorch .* Set model\.device=cpu")
    if not torch.cuda.is_available()
    else Case("cpu", lambda s: s.parts.policy.model.device.type, "cpu"),
    "model.chat_template": Case("shout.jinja", first_prompt, "What is 0 + 2?!!!", "data.shuffle=false"),
    "model.tool_format": Case("llama", see.reads_calls, True),
    **{
        f"model.{key}": Case(value, refused=rf"model\.{key}={re.escape(value)}: has no effect because Llama\w+ sees no")
        for key, value in SIGHT.items()
    },
}
SANDBOX = {  # what each does with programs: tests/rewards/test_code.py
    **{
        f"sandbox.{key}": Case(value, refused=rf"sandbox\.{key}=.* has no effect because reward\.functions")
        for key, value in (
            *(("kind", "process"), ("workers", "3"), ("seconds", "1")),
            *(("total_seconds", "99"), ("memory_mb", "64")),
        )
    },
    "reward.code_partial": Case("false", refused=r"reward\.functions does not name code"),
}
SERVERS = {
    **{"engine.count": "2", "engine.attach": "[a/b]", "engine.python": sys.executable, "engine.threads": "2"},
    **{"engine.tensor_parallel": "2", "engine.pipeline_parallel": "2", "engine.memory_fraction": "0.5"},
    **{"engine.arguments": "[--seed=1]", "engine.sleep": "true", "engine.start_timeout": "9"},
    **{"engine.request_timeout": "9", "engine.restarts": "1"},
}
UNJUDGED = r"has no effect because reward\.functions does not name judge"
JUDGE = {"judge": "[http://x/v1]", "judge_prompt": "x", "judge_tokens": "2", "judge_cache": "false", "judge_rate": "9"}
JUDGE |= {"judge_mode": "pairs", "judge_rounds": "2", "judge_rubric": "['2: Short']", "judge_rubric_column": "rubric"}
JUDGE |= {"judge_panel": "median"}
STALE = "steps=4 rollout.max_staleness=2 rollout.max_tokens=40 engine.max_batch=6 "
MEASURED = {  # keys of RL and Eval whose effect shows in the same place
    "data.prompt_column": Case("other", first_prompt),
    "data.answer_column": Case("other", lambda s: s.groups[0].task.answer, "seven"),
    "data.system_prompt": Case("Be brief.", lambda s: "Be brief." in first_prompt(s), True),
    "data.apply_chat_template": Case("false", lambda s: "user" in first_prompt(s), False),
    "reward.functions": Case("length", see.reward_names, {"length"}),
    "reward.weights": Case(
        "[1,-1]", lambda s: rewards(s.groups), under="reward.functions=[given:letters,given:shortness]"
    ),
    "reward.workers": Case("2", lambda s: len(set(rewards(s.groups))), 2, "reward.functions=rewards.py:process"),
    "reward.format_pattern": Case(".", lambda s: set(rewards(s.groups)), {1.0}, "reward.functions=format"),
    "reward.model": Case("x", refused=r"reward\.model=x: has no effect because reward\.functions does not name model"),
    "reward.length_target": Case("1", lambda s: rewards(s.groups), under="reward.functions=length"),
    # what each of these does with a judge: tests/rewards/test_judge.py, test_panel.py
    **{f"reward.{key}": Case(value, refused=UNJUDGED) for key, value in JUDGE.items()},
    "reward.concurrency": Case(
        "2", refused=r"reward\.concurrency=2: has no effect because no reward is computed over HTTP"
    ),
    **SANDBOX,
    "engine.max_batch": Case("1", lambda s: s.decoded_at_once, 1),
    "engine.draft_rows": Case("0", lambda s: s.guesses, 0, "data.validation=b.jsonl validation.max_tokens=60"),
    "engine.weights": Case(
        "int8", lambda s: getattr(s.parts.rollout.engine.runner.model, "in_int8", False), True, "model.dtype=bfloat16"
    ),
    # what each of these does with servers: tests/train/test_engines.py
    **{key: Case(value, refused=r"engine\.kind=embedded does not read it") for key, value in SERVERS.items()},
    "engine.kind": Case("birl", lambda s: type(s.parts.rollout.engine).__name__, "Servers"),
    "engine.kv_cache_gb": Case("1e-5", refused=r"engine\.kv_cache_gb=1e-05 holds the keys and values of \d+ tokens"),
    "threads": Case("2", lambda s: s.threads, 2),
}
HELD_OUT = "data.validation=b.jsonl "
SAMPLED = HELD_OUT + "validation.temperature=1 "
UNEQUAL = "algorithm.updates_per_batch=2 optimizer.lr=0.002 "
IN_REWARD = "algorithm.kl_coef=0.1 algorithm.kl=k1 algorithm.kl_in=reward steps=3 "
COVARIANCE = "algorithm.entropy_control=clip_cov algorithm.entropy_share=0.5 "
# engine and learner differ only off the kernels, and there in the last bits
RECOMPUTED = "algorithm.proximal=recompute model.path=plain " + UNEQUAL
PPO = "algorithm=ppo "
JUDGED = "reward.functions=given:even steps=5"
ALIKE, SOMETIMES = "reward.functions=given:constant", "reward.functions=given:sometimes_constant"
LEAGUE = "policies=[one] lora.rank=4"
FALLING = HELD_OUT + "reward.functions=given:falling validation.at_start=false validation.every=1 steps=2 "
FALLING += "checkpoint.every=1 checkpoint.keep_last=1"
TAUGHT = "algorithm.teacher=other algorithm.teacher_divergence=jsd "
RL_CASES = {
    **MODEL,
    **MEASURED,
    "model.max_length": Case("100", see.rows, 6, "data.train=long.jsonl"),
    "data.train": Case("b.jsonl", tasks),
    "data.weights": Case("[0,1]", lambda s: {t[0] for t in tasks(s)}, {"b"}, "data.train=[a.jsonl,b.jsonl] steps=4"),
    "data.validation": Case("b.jsonl", lambda s: len(s.validated), 6),
    "data.validation_split": Case("0.5", lambda s: (len(s.validated), see.rows(s)), (6, 3)),
    "data.subset": Case("second", lambda s: s.groups[0].task.answer, "other", "data.train=subsets"),
    "data.split": Case("test", lambda s: {t.partition(":")[0] for t in tasks(s)}, under="data.train=splits"),
    "data.validation_data_split": Case("train", lambda s: s.validated[0].task.answer, "0", "data.validation=splits"),
    "data.max_samples": Case("3", see.rows, 3),
    "data.max_validation_samples": Case("2", lambda s: len(s.validated), 4, HELD_OUT),
    "data.max_prompt_tokens": Case("100", see.rows, 6, "data.train=long.jsonl"),
    "data.shuffle": Case("false", tasks, ["a.jsonl:0", "a.jsonl:1", "a.jsonl:2", "a.jsonl:3"], "rollout.prompts=4"),
    "data.order": Case("thompson", tasks, under=JUDGED),
    "data.order_target": Case("1", tasks, under="data.order=thompson " + JUDGED),
    "data.order_start": Case("0", tasks, under="data.order=curriculum " + JUDGED),
    "data.order_half_life": Case("1", last("order/predicted"), under="data.order=thompson " + JUDGED),
    "data.order_threshold": Case("6", last("order/observed"), under="data.order=thompson data.order_threshold=3"),
    "data.retire_after": Case("1", last("order/solved"), 4, "data.order=thompson steps=2 " + ALIKE),
    "data.retire_for": Case("1", last("order/solved"), 2, "data.order=thompson steps=3 data.retire_after=1 " + ALIKE),
    "algorithm.baseline": Case("none", lambda s: advantages(s) == rewards(s.groups), True),
    "algorithm.scale_rewards": Case("group", advantages),
    "algorithm.advantage": Case("gdpo", advantages),
    "algorithm.advantage_args": Case("[factor=2]", advantages, under="algorithm.advantage=custom.py:advantage"),
    "algorithm.pass_k": Case(
        "2", advantages, under="reward.functions=given:even algorithm.advantage=pass_at_k rollout.group_size=8"
    ),
    "algorithm.surrogate": Case("gspo", weights, under=UNEQUAL),
    "algorithm.surrogate_args": Case("[beta=2]", last("grad_norm"), under="algorithm.surrogate=custom.py:loss"),
    "algorithm.dual_clip": Case("1.0001", last("clip_fraction"), under=UNEQUAL),
    "algorithm.clip_low": Case("0", last("clip_fraction"), under=UNEQUAL),
    "algorithm.clip_high": Case("0", last("clip_fraction"), under=UNEQUAL),
    "algorithm.denominator": Case("token", last("grad_norm"), under="rollout.stop=[e,a,i,o,n]"),
    "algorithm.kl": Case("k1", last("kl"), under="algorithm.kl_coef=0.1 steps=2"),
    "algorithm.kl_coef": Case("0.5", lambda s: (s.metrics[-1].get("kl") is not None, s.weights), under="steps=2"),
    "algorithm.kl_in": Case("reward", lambda s: "kl/coef" in s.metrics[-1], True, "algorithm.kl_coef=0.1 steps=2"),
    "algorithm.kl_corrected": Case("true", weights, under="algorithm.kl_coef=0.1 " + UNEQUAL + "steps=2"),
    "algorithm.kl_target": Case("0.001", last("kl/coef"), under=IN_REWARD),
    "algorithm.kl_horizon": Case("100", last("kl/coef"), under=IN_REWARD + "algorithm.kl_target=0.001"),
    "algorithm.entropy_coef": Case("0.1", weights),
    "algorithm.observation_coef": Case("0.1", weights, under=WORLD),
    "algorithm.entropy_control": Case("top_entropy", last("factor"), under="rollout.group_size=8"),
    "algorithm.entropy_share": Case("0.5", last("factor"), under="algorithm.entropy_control=top_entropy"),
    "algorithm.covariance_low": Case("-100", last("factor"), under=COVARIANCE),
    "algorithm.covariance_high": Case("-50", last("factor"), under=COVARIANCE + "algorithm.covariance_low=-100"),
    "algorithm.held_coef": Case(
        "9", weights, under="algorithm.entropy_control=kl_cov algorithm.entropy_share=0.5 " + UNEQUAL
    ),
    "algorithm.proximal": Case("interpolate", last("ratio/max"), under="algorithm.passes=2 " + UNEQUAL),
    "algorithm.correction": Case("none", last("factor"), under=RECOMPUTED),
    "algorithm.correction_level": Case("sequence", last("factor"), under=RECOMPUTED),
    "algorithm.correction_low": Case("1.5", last("factor"), under="algorithm.correction=mask " + RECOMPUTED),
    "algorithm.correction_high": Case("0.5", last("factor"), under=RECOMPUTED),
    "algorithm.second_moment": Case("1e-9", last("factor"), under=UNEQUAL),
    "algorithm.reject": Case("divergence", last("factor"), under=UNEQUAL),
    "algorithm.reject_limit": Case("1e-9", last("factor"), under="algorithm.reject=divergence " + UNEQUAL),
    "algorithm.teacher": Case("other", advantages),
    "algorithm.teachers": Case("[seven=model,eight=other]", advantages),
    "algorithm.teacher_column": Case("other", advantages, under="algorithm.teachers=[seven=other,eight=model]"),
    "algorithm.teacher_coef": Case("2", advantages, under="algorithm.teacher=other"),
    "algorithm.teacher_divergence": Case("jsd", last("divergence"), under="algorithm.teacher=other"),
    "algorithm.teacher_beta": Case("0.1", last("divergence"), under=TAUGHT),
    "algorithm.teacher_top_k": Case("4", last("divergence"), under=TAUGHT),
    "algorithm.teacher_rate": Case("0.5", last("divergence"), under="algorithm=sdft steps=3"),
    "algorithm.hint": Case("['It is {answer}']", last("divergence"), under="algorithm=sdft"),
    "algorithm.length_penalty": Case("1", advantages, under="rollout.stop=[e,a,i,o,n]"),
    "critic.path": Case("other", last("critic/value"), under=PPO),
    "critic.shared": Case("true", lambda s: "critic/grad_norm" in s.metrics[-1], False, PPO),
    "critic.lr": Case("0.1", last("critic/value"), under=PPO + "steps=2"),
    "critic.coef": Case("5", weights, under=PPO + "critic.shared=true"),
    "critic.clip": Case("1e-6", last("critic/clip_fraction"), under=PPO + UNEQUAL + "steps=2 critic.lr=0.01"),
    "critic.gamma": Case("0.5", advantages, under=PPO),
    "critic.lam": Case("0", advantages, under=PPO),
    "critic.whiten": Case("false", advantages, under=PPO),
    "critic.lam_alpha": Case("0.5", advantages, under=PPO),
    "critic.passes": Case("3", last("critic/loss"), under=PPO + "critic.lr=0.01"),
    "critic.freeze_attention": Case("true", last("critic/value"), under=PPO + "steps=2 critic.lr=0.1"),
    "critic.freeze_steps": Case("1", last("updates/done"), 0.0, PPO),
    "algorithm.dynamic_sampling": Case(
        "true", lambda s: s.metrics[-1]["groups/refilled"] > 0, True, SOMETIMES + " rollout.prompts=4"
    ),
    "algorithm.max_refill": Case("0.4", last("groups/kept"), under=SOMETIMES + " algorithm.dynamic_sampling=true"),
    "algorithm.overlong_buffer": Case("7", advantages, under="algorithm.baseline=none"),
    "algorithm.overlong_penalty": Case("3", advantages, under="algorithm.baseline=none algorithm.overlong_buffer=7"),
    "algorithm.mask_truncated": Case("true", last("tokens/trained"), 0.0, "rollout.max_tokens=2"),  # all are cut
    "algorithm.router_replay": Case("rollout", weights, under="model.path=moe algorithm.passes=4"),
    "algorithm.passes": Case("2", last("updates/done"), 2.0),
    "algorithm.updates_per_batch": Case("2", last("updates/done"), 2.0),
    "algorithm.credit": Case("turn", weights, under=WORLD),
    "algorithm.turn_discount": Case("0.5", weights, under=f"{WORLD} algorithm.credit=turn"),
    **ENVIRONMENT,
    "env.timeout": Case("1e-9", last("outcome/timeout"), 8.0, "rollout.max_failure_rate=1"),
    "env.sampling": Case("agent", refused=r"env\.sampling=agent: the log-probs that are trained", under=AGENT),
    "rollout.prompts": Case("3", last("groups/kept"), 3.0),
    "rollout.group_size": Case("3", last("outcome/asked"), 6.0),
    "rollout.max_tokens": Case("5", last("length/max"), 5.0),
    "rollout.temperature": Case("0.5", answers),
    "rollout.top_p": Case("0.3", answers),
    "rollout.top_k": Case("3", answers),
    "rollout.min_p": Case("0.5", answers),
    "rollout.stop": Case("[e,a,i,o,n]", last("length/mean")),
    "rollout.failed": Case("drop_group", advantages, [None] * 8, "reward.functions=given:first_fails"),
    "rollout.truncated": Case("drop", lambda s: None in advantages(s), True),
    "rollout.max_failure_rate": Case(
        "0.2", under="reward.functions=given:first_fails", refused=r"more than rollout\.max_failure_rate=0\.2 allows"
    ),
    "rollout.max_staleness": Case("1", lambda s: max(m["staleness/max"] for m in s.metrics), 1.0, "steps=3"),
    "rollout.order_window": Case(
        "2", lambda s: s.metrics[0]["queue/ready"] + s.metrics[0]["queue/running"], 2.0, STALE
    ),
    "rollout.oversample": Case("2", last("tokens/generated")),
    "engine.recompute_kv": Case(
        "false", lambda s: s.parts.engine.counters.restarts, 0, STALE + "learner.max_logprob_gap=99"
    ),
    "weights.method": Case("direct", refused="engine.kind=embedded supports memory"),
    **{
        f"weights.{key}": Case(value, refused="(the learner's own weights|writes none|sends no buckets|allows)")
        for key, value in (
            *(("sync_every", "2"), ("folder", "elsewhere"), ("bucket_mb", "1")),
            *(("timeout", "9"), ("canary", "1"), ("max_gap", "0.5")),
        )
    },
    "track.record": Case("true", lambda s: (s.run / "record.jsonl").is_file(), True),
    "debug.replay": Case("nowhere", refused=r"debug\.replay=nowhere: has no record\.jsonl"),
    "debug.resample": Case("true", refused=r"debug\.replay is empty"),
    "debug.only_rollout": Case("true", last("updates/done"), 0.0),
    "watchdog": Case("77", lambda s: s.watchdog, 77.0),
    "reward.timeout": Case(
        "0.1", last("outcome/timeout"), 8.0, "reward.functions=given:slow rollout.max_failure_rate=1"
    ),
    "validation.every": Case(
        "1", lambda s: [r["step"] for r in s.lines("validation.jsonl")], [0, 1, 2], HELD_OUT + "steps=2"
    ),
    "validation.at_start": Case("false", lambda s: [r["step"] for r in s.lines("validation.jsonl")], [1], HELD_OUT),
    "validation.samples": Case("2", lambda s: {len(g.trajectories) for g in s.validated}, {2}, SAMPLED),
    "validation.k": Case(
        "[1,2]",
        lambda s: "validation/all/pass@2" in s.lines("validation.jsonl")[0],
        True,
        SAMPLED + "validation.samples=2 validation.threshold=1",
    ),
    "validation.threshold": Case("2.5", lambda s: s.lines("validation.jsonl")[0].get("threshold"), 2.5, HELD_OUT),
    "validation.temperature": Case("1", lambda s: see.texts(s.validated[:3], s), under=HELD_OUT),
    "validation.top_p": Case("0.1", lambda s: see.texts(s.validated[:3], s), under=SAMPLED),
    "validation.top_k": Case("1", lambda s: see.texts(s.validated[:3], s), under=SAMPLED),
    "validation.max_tokens": Case("4", lambda s: max(lengths(s.validated)), 4, HELD_OUT),
    "optimizer.lr": Case("0.001", see.rates, [0.001]),
    "optimizer.schedule": Case("linear", see.rates, under="steps=3"),
    "optimizer.warmup_steps": Case("2", see.rates, under="steps=3"),
    "optimizer.min_lr_ratio": Case("0.5", lambda s: see.rates(s)[-1], 0.00625, "optimizer.schedule=cosine steps=3"),
    "optimizer.beta1": Case("0.1", weights, under="steps=2"),
    "optimizer.beta2": Case("0.1", weights, under="steps=2"),
    "optimizer.eps": Case("0.1", weights),
    "optimizer.weight_decay": Case("0.5", weights),
    "optimizer.kind": Case("adamw8bit", weights),
    "optimizer.offload": Case("cpu", refused=r"optimizer\.offload=cpu: the weights are in CPU memory already"),
    "optimizer.max_grad_norm": Case("0.001", weights, under="optimizer.eps=0.1"),
    "lora.rank": Case("4", weights),
    "lora.alpha": Case("8", last("grad_norm"), under="lora.rank=4"),
    "lora.targets": Case("[q_proj]", weights, under="lora.rank=4"),
    "lora.dora": Case("true", weights, under="lora.rank=4"),
    "lora.quantize": Case("nf4", last("grad_norm"), under="lora.rank=4"),
    "policies": Case("[one]", lambda s: {turn.policy for t in see.played(s) for turn in t.turns}, {"one"}),
    "league.every": Case("1", see.in_the_league, 4, LEAGUE),
    "league.size": Case("2", see.in_the_league, 2, LEAGUE + " league.every=1"),
    # what it does: tests/parallel/test_context.py
    "parallel.context": Case("ulysses", refused=r"parallel\.context=ulysses: has no effect because parallel\.cp=1"),
    "learner.tokens_per_microbatch": Case("80", lambda s: s.passes > 1, True),
    "learner.gradient_checkpointing": Case("true", lambda s: s.parts.policy.model.is_activation_checkpointing, True),
    **PARALLEL,
    "learner.router_aux_coef": Case("0.5", weights, under="model.path=moe"),
    "parallel.ep": Case("2", refused=r"parallel\.ep=2: must divide parallel\.fsdp x parallel\.cp = 1 x 1"),
    "learner.max_logprob_gap": Case(
        "1e-12", refused=r"learner\.max_logprob_gap=1e-12 is allowed", under="model.path=plain"
    ),
    "checkpoint.every": Case("1", see.saved, ["step-000001", "step-000002"], "steps=2"),
    "checkpoint.keep_last": Case("1", see.saved, ["step-000002"], "steps=2 checkpoint.every=1"),
    "checkpoint.store": Case("memory://every", see.stored, True),
    "checkpoint.asynchronous": Case("false", lambda s: s.parts.worker.checkpoints.writer.staged, 0),
    "checkpoint.keep_best": Case("false", see.saved, ["step-000002"], FALLING),
    "track.console": Case("plain", lambda s: "step    1/1" in s.printed, True),
    "track.tensorboard": Case("true", lambda s: (s.run / "tensorboard").is_dir(), True),
    **{f"track.{name}": Case("offline", see.told_tracker(name), "offline") for name in KINDS},
    "track.rollouts": Case("false", lambda s: len(s.lines("rollouts.jsonl")), 0),
    "track.token_figures": Case(
        "false", lambda s: [x for r in s.lines("rollouts.jsonl") for x in r["samples"] if "gaps" in x], []
    ),
    "track.report": Case("true", lambda s: (s.run / "report.html").is_file(), True),
    "track.trace": Case("false", lambda s: (s.run / "trace.json").is_file(), False),
    "steps": Case("2", lambda s: len(s.metrics), 2),
    "epochs": Case("2", lambda s: len(s.metrics), 6, "steps=0"),
    "seed": Case("1", answers),
    "run": Case("elsewhere", lambda s: Path("elsewhere/metrics.jsonl").is_file(), True),
    "resume": Case("earlier/checkpoints/step-000001", lambda s: [m["step"] for m in s.metrics], [2], "steps=2"),
}
UNTRAINED = r"has no effect because `birl eval` does not train"
WARM = "validation.temperature=1 "
UNREAD = {
    **{"data.train": "a.jsonl", "data.weights": "[1]", "data.validation_split": "0.5", "data.split": "test"},
    **{"data.max_samples": "2", "data.max_prompt_tokens": "100", "data.shuffle": "false", "data.order": "thompson"},
    **{f"data.order_{key}": "0.2" for key in ("target", "start", "half_life", "threshold")},
    **{"data.retire_after": "2", "data.retire_for": "2", "validation.every": "1", "validation.at_start": "false"},
}
EVAL_CASES = {
    **MODEL,
    "model.chat_template": Case("shout.jinja", first_prompt, "What is 10 + 2?!!!"),
    "model.max_length": Case(
        "100", lambda s: min(lengths(s.groups)), under="data.validation=long.jsonl validation.max_tokens=60"
    ),
    **MEASURED,
    **ENVIRONMENT,
    "env.max_turns": Case("1", see.turns, {1}, WORLD_EVAL),
    "env.cut_turn": Case("continue", see.turns, {3}, WORLD_EVAL + " validation.max_tokens=1"),
    "env.timeout": Case("1e-9", refused=r"longer than env\.timeout=1e-09"),
    "env.sampling": Case("agent", answers, under=AGENT + " reward.functions=given:letters"),
    "data.validation": Case("a.jsonl", tasks),
    "data.subset": Case("second", lambda s: s.groups[0].task.answer, "other", "data.validation=subsets"),
    "data.validation_data_split": Case("train", lambda s: s.groups[0].task.answer, "0", "data.validation=splits"),
    "data.max_validation_samples": Case("2", lambda s: len(s.groups), 2),
    **{key: Case(value, refused=UNTRAINED) for key, value in UNREAD.items()},
    "validation.samples": Case("2", lambda s: {len(g.trajectories) for g in s.groups}, {2}, WARM),
    "validation.k": Case(
        "[1,2]", lambda s: "pass@2" in s.printed, True, WARM + "validation.samples=2 validation.threshold=1"
    ),
    "validation.threshold": Case("0.25", lambda s: "at least 0.25" in s.printed, True),
    "validation.temperature": Case("1", answers),
    "validation.top_p": Case("0.1", answers, under=WARM),
    "validation.top_k": Case("1", answers, under=WARM),
    "validation.max_tokens": Case("4", lambda s: max(lengths(s.groups)), 4),
    "engine.recompute_kv": Case("false", refused="weights do not change"),
    "reward.timeout": Case("0.1", under="reward.functions=given:slow", refused="reward .* took longer than 0.1 s"),
    "output": Case("results.json", lambda s: Path("results.json").is_file(), True),
    "baseline": Case("none.json", refused="baseline=none.json cannot be read"),
    "seed": Case("1", answers, under=WARM),
}


@pytest.fixture(scope="module")
def bench(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with opened_bench(tiny, tmp_path_factory.mktemp("every_key")) as result:
        yield result


@pytest.mark.parametrize("key", documentation(RL))
def test_changing_it_changes_a_training_run(bench: Bench, key: str) -> None:
    prove(bench, RL, key, RL_CASES.get(key))


@pytest.mark.parametrize("key", documentation(Eval))
def test_changing_it_changes_an_evaluation(bench: Bench, key: str) -> None:
    prove(bench, Eval, key, EVAL_CASES.get(key))


def test_there_is_no_case_for_a_key_that_is_gone() -> None:
    assert RL_CASES.keys() <= documentation(RL).keys()
    assert EVAL_CASES.keys() <= documentation(Eval).keys()


def test_what_only_bounds_memory_or_time_changes_no_result(bench: Bench) -> None:
    expected = bench.seen(RL, "")
    bounds = ("learner.tokens_per_microbatch=200", "learner.gradient_checkpointing=true", "engine.max_batch=1")
    for setting in (*bounds, "engine.kv_cache_gb=0"):
        found = bench.observe(RL, setting)
        assert answers(found) == answers(expected)
        assert found.metrics[-1]["grad_norm"] == pytest.approx(expected.metrics[-1]["grad_norm"], rel=1e-4)
