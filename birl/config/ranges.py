"""What each key allows by itself: `CHOICES` and `RANGES`; every number in the schema has a range. Standard library
only."""

import math
from dataclasses import dataclass

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("bfloat16", "float32"),
    "model.device": ("auto", "cpu", "cuda"),
    "model.tool_format": (
        *("auto", "hermes", "qwen_coder", "llama", "mistral", "deepseek", "harmony", "function_gemma"),
    ),
    "algorithm.baseline": ("group", "leave_one_out", "batch", "optimal", "greedy", "none"),
    "algorithm.scale_rewards": ("none", "group", "batch", "rewards", "mean"),
    "algorithm.denominator": ("token", "sequence", "group", "constant"),
    "algorithm.kl": ("k1", "k2", "k3", "abs"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.credit": ("trajectory", "turn"),
    "algorithm.entropy_control": ("none", "top_entropy", "clip_cov", "kl_cov"),
    "algorithm.proximal": ("auto", "behaviour", "recompute", "interpolate"),
    "algorithm.correction": ("auto", "none", "truncate", "mask"),
    "algorithm.correction_level": ("token", "geometric", "sequence"),
    "algorithm.reject": ("none", "divergence", "off_policy"),
    "algorithm.router_replay": ("none", "rollout"),
    "env.sampling": ("run", "agent"),
    "env.cut_turn": ("end", "continue"),
    "data.too_long": ("drop", "truncate"),
    "denominator": ("token", "sequence"),
    "preference.loss": ("dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"),
    "preference.reference": ("live", "precomputed", "none"),
    "rollout.failed": ("drop", "drop_group"),
    "rollout.truncated": ("keep", "drop"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "engine.kind": ("embedded", "birl", "vllm", "sglang"),
    "weights.method": ("auto", "memory", "reload", "shared", "volume", "direct", "nccl", "checkpoint"),
    "sandbox.kind": ("auto", "zygote", "bubblewrap", "landlock", "process", "modal"),
    "optimizer.offload": ("none", "cpu"),
    "parallel.context": ("gather", "ulysses"),
    "track.console": ("live", "plain", "off", "auto"),
    "track.wandb": ("off", "offline", "online"),
    "track.mlflow": ("off", "offline", "online"),
    "track.trackio": ("off", "offline", "online"),
    "track.swanlab": ("off", "offline", "online"),
}


#: those of the package; a function of one's own may take their place
PARTS: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": (
        *("relative", "gdpo", "pass_at_k", "best_and_worst", "zero"),
        *("returns", "gae", "turn_gae"),
    ),
    "algorithm.surrogate": (
        *("clip", "gspo", "gmpo", "cispo", "sapo", "reinforce", "importance", "dppo", "online_dpo"),
    ),
}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a key allows; `open_low` and `open_high` leave the bound itself out."""

    low: float = 0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"{'more than' if self.open_low else 'at least'} {self.low:g}"
        high = f" and {'less than' if self.open_high else 'at most'} {self.high:g}" if math.isfinite(self.high) else ""
        return low + high


COUNT = Range(1)
ANY = Range(0)
SHARE = Range(0, 1)
POSITIVE = Range(0, open_low=True)
LONGEST = 1e7  # seconds: more than clocks and threads can wait for
WAIT = Range(0, LONGEST, open_low=True)
THREADS = Range(0, 1024)
SIZE = Range(0, 1e6)
DECAY = Range(0, 1, open_high=True)

RANGES: dict[str, Range] = {
    "model.max_length": ANY,
    "data.weights": ANY,
    "data.validation_split": DECAY,
    "data.max_samples": ANY,
    "data.max_validation_samples": ANY,
    "data.max_prompt_tokens": ANY,
    "algorithm.clip_low": ANY,
    "algorithm.clip_high": ANY,
    "algorithm.kl_coef": ANY,
    "algorithm.kl_target": ANY,
    "algorithm.kl_horizon": COUNT,
    "algorithm.dual_clip": ANY,
    "algorithm.pass_k": COUNT,
    "algorithm.entropy_coef": ANY,
    "algorithm.entropy_share": SHARE,
    "algorithm.covariance_low": Range(-math.inf),
    "algorithm.covariance_high": Range(-math.inf),
    "algorithm.held_coef": ANY,
    "algorithm.correction_low": ANY,
    "algorithm.correction_high": POSITIVE,
    "algorithm.second_moment": ANY,
    "algorithm.reject_limit": ANY,
    "algorithm.teacher_coef": ANY,
    "algorithm.length_penalty": ANY,
    "critic.lr": SHARE,
    "critic.coef": ANY,
    "critic.clip": ANY,
    "critic.gamma": SHARE,
    "critic.lam": SHARE,
    "critic.freeze_steps": ANY,
    "algorithm.max_refill": ANY,
    "algorithm.overlong_buffer": ANY,
    "algorithm.overlong_penalty": ANY,
    "algorithm.updates_per_batch": COUNT,
    "algorithm.passes": COUNT,
    "algorithm.turn_discount": SHARE,
    "env.max_turns": COUNT,
    "env.timeout": WAIT,
    "rollout.prompts": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_tokens": COUNT,
    "rollout.temperature": ANY,
    "rollout.top_p": Range(0, 1, open_low=True),
    "rollout.top_k": ANY,
    "rollout.min_p": SHARE,
    "rollout.max_failure_rate": SHARE,
    "rollout.max_staleness": ANY,
    "rollout.order_window": ANY,
    "rollout.oversample": ANY,
    "preference.beta": POSITIVE,
    "preference.label_smoothing": Range(0, 0.5, open_high=True),
    "preference.margin": ANY,
    "preference.nll_coef": ANY,
    "preference.desirable_weight": ANY,
    "preference.undesirable_weight": ANY,
    "ranking.centering": ANY,
    "batch_size": COUNT,
    "validation.every": ANY,
    "validation.samples": COUNT,
    "validation.k": COUNT,
    "validation.threshold": ANY,
    "validation.temperature": ANY,
    "validation.top_p": Range(0, 1, open_low=True),
    "validation.top_k": ANY,
    "validation.max_tokens": ANY,
    "reward.weights": Range(-math.inf),
    "reward.timeout": Range(0, LONGEST),
    "reward.workers": Range(1, 1024),
    "reward.length_target": COUNT,
    "reward.judge_tokens": COUNT,
    "reward.concurrency": COUNT,
    "sandbox.workers": THREADS,
    "sandbox.seconds": WAIT,
    "sandbox.total_seconds": WAIT,
    "sandbox.memory_mb": Range(32, 1e9),
    "engine.max_batch": COUNT,
    "engine.draft_rows": ANY,
    "engine.count": COUNT,
    "engine.threads": THREADS,
    "engine.tensor_parallel": COUNT,
    "engine.pipeline_parallel": COUNT,
    "engine.memory_fraction": Range(0, 1, open_low=True),
    "engine.start_timeout": WAIT,
    "engine.request_timeout": WAIT,
    "engine.restarts": ANY,
    "weights.sync_every": COUNT,
    "weights.bucket_mb": Range(1, 1e6),
    "weights.timeout": WAIT,
    "weights.canary": ANY,
    "weights.max_gap": POSITIVE,
    "engine.kv_cache_gb": SIZE,
    "optimizer.lr": SHARE,
    "optimizer.warmup_steps": ANY,
    "optimizer.min_lr_ratio": SHARE,
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": ANY,
    "optimizer.max_grad_norm": ANY,
    "lora.rank": ANY,
    "lora.alpha": POSITIVE,
    "learner.tokens_per_microbatch": COUNT,
    "learner.router_aux_coef": ANY,
    "learner.max_logprob_gap": ANY,
    "parallel.ddp": Range(1, 2**16),
    "parallel.fsdp": Range(1, 2**16),
    "parallel.cp": Range(1, 2**16),
    "parallel.tp": Range(1, 2**16),
    "parallel.timeout": WAIT,
    "parallel.ep": Range(1, 2**16),
    "checkpoint.every": ANY,
    "checkpoint.keep_last": ANY,
    "steps": ANY,
    "epochs": COUNT,
    "watchdog": Range(0, LONGEST),
    "seed": Range(0, 2**32 - 1),
    "threads": THREADS,
    "port": Range(0, 65535),
    "max_request_mb": Range(0, 1e6, open_low=True),
    "max_waiting": ANY,
    "request_timeout": WAIT,
    "drain_timeout": Range(0, LONGEST),
}
