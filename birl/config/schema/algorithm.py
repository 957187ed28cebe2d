"""Configuration keys of the loss of reinforcement learning."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Amount, Count, Function, Positive, Real, Section, Share, Whole


@dataclass(kw_only=True)
class Algorithm(Section):
    advantage: (
        Literal["relative", "gdpo", "pass_at_k", "best_and_worst", "zero", "returns", "gae", "turn_gae"] | Function
    ) = "relative"
    """Advantage estimator: relative ((reward - algorithm.baseline) / algorithm.scale_rewards) | gdpo (each reward
    function normalised separately) | pass_at_k | returns (REINFORCE++: reward minus the KL of this and all later
    tokens, normalised over all tokens) | gae, turn_gae (GAE with a critic, per token or per turn) | best_and_worst
    (pairs for surrogate online_dpo) | zero (learn from the teacher only) | my_file.py:my_function."""
    advantage_args: list[str] = field(default_factory=list)
    """Options of your advantage function, as name=value."""
    baseline: Literal["group", "leave_one_out", "batch", "optimal", "greedy", "none"] = "group"
    """Baseline that is subtracted from each reward: group (mean of the prompt's episodes) | leave_one_out (mean of the
    others, RLOO) | batch (mean of all) | optimal (mean weighted by length, OPO) | greedy (reward of the greedy answer,
    ReMax) | none."""
    scale_rewards: Literal["none", "group", "batch", "rewards", "mean"] = "none"
    """Divisor of each advantage: none (Dr. GRPO) | group (std of the group, GRPO) | batch (std of all advantages) |
    rewards (std of all rewards, Lite PPO) | mean (mean reward of the group, MaxRL)."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Credit assignment: trajectory (all turns of an episode get the same) | turn (reward from this turn on, compared
    with the same turn of the group's other episodes)."""
    turn_discount: Share = 1.0
    """Discount of later rewards per turn, for algorithm.credit=turn."""
    pass_k: Count = 4
    """k of pass@k, for algorithm.advantage=pass_at_k."""
    surrogate: (
        Literal["clip", "gspo", "gmpo", "cispo", "sapo", "reinforce", "importance", "dppo", "online_dpo"] | Function
    ) = "clip"
    """Policy loss of a token: clip (PPO) | gspo | gmpo | cispo | sapo | dppo | reinforce (no importance ratio) |
    importance (unbounded ratio) | online_dpo | my_file.py:my_function."""
    surrogate_args: list[str] = field(default_factory=list)
    """Further options of the surrogate, as name=value: [tau_positive=1.0,tau_negative=1.05] for sapo,
    [divergence=tv,threshold=0.15] for dppo, [beta=0.1] for online_dpo, or the options of your function."""
    clip_low: Amount = 0.2
    """Clip range below 1: importance ratios below 1 - clip_low give no gradient if the advantage is negative (PPO)."""
    clip_high: Amount = 0.2
    """Clip range above 1: importance ratios above 1 + clip_high give no gradient if the advantage is positive; 0.28 in
    DAPO."""
    dual_clip: Amount = 0.0
    """Dual clip: bound on the loss of a token with a negative advantage, in units of |advantage|; usually 3. 0: off."""
    denominator: Literal["token", "sequence", "group", "constant"] = "constant"
    """Normalisation of the summed loss: token (mean over all trained tokens) | sequence (mean per answer, then over
    answers) | group (mean per prompt, then over prompts) | constant (number of answers x rollout.max_tokens, Dr.
    GRPO)."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of KL(policy || reference model), if kl_coef > 0: k1 | k2 | k3 (Schulman) | abs."""
    kl_coef: Amount = 0.0
    """Coefficient of the KL penalty. Above 0, a frozen copy of the initial weights is kept as the reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty is applied: loss | reward (subtracted from each token's reward with advantage=returns or a
    critic, else from the episode's reward)."""
    kl_corrected: bool = False
    """Multiply the KL in the loss by the importance ratio, which makes its gradient unbiased off-policy
    (DeepSeek-V3.2)."""
    kl_target: Amount = 0.0
    """Adaptive KL: adjust kl_coef so that the KL of an answer stays near this value [nats]. 0: kl_coef is fixed."""
    kl_horizon: Count = 10000
    """Horizon of the adaptive KL controller: larger values change kl_coef more slowly [episodes]."""
    entropy_coef: Amount = 0.0
    """Coefficient of the entropy bonus. 0: off."""
    observation_coef: Amount = 0.0
    """Weight of a cross-entropy loss on the text of environments and tools between the model's turns, with the
    denominator of the policy loss (ECHO; 0.05 in the paper). 0: off."""
    entropy_control: Literal["none", "top_entropy", "clip_cov", "kl_cov"] = "none"
    """Token selection that keeps the entropy high: none | top_entropy (train only the tokens with the highest entropy)
    | clip_cov (no gradient for some tokens with a high covariance of log-prob and advantage) | kl_cov (KL penalty
    towards the old policy on the tokens with the highest covariance)."""
    entropy_share: Share = 0.2
    """Share of the step's tokens that entropy_control selects: usually 0.2 for top_entropy, 0.0002 for the others."""
    covariance_low: Real = 1.0
    """clip_cov selects among tokens with at least this covariance."""
    covariance_high: Real = 5.0
    """clip_cov selects among tokens with at most this covariance."""
    held_coef: Amount = 1.0
    """Coefficient of kl_cov's penalty towards the old policy."""
    proximal: Literal["auto", "behaviour", "recompute", "interpolate"] = "auto"
    """Proximal policy, the denominator of the importance ratio: behaviour (the policy that sampled) | recompute (the
    learner's log-probs before the first update on the batch; decoupled PPO) | interpolate (between behaviour and
    current policy, by age; A-3PO) | auto (recompute if rollout.max_staleness > 0 or engine.weights=int8, except for
    gspo, gmpo, cispo, sapo, dppo and second_moment, whose papers use the behaviour policy; else behaviour)."""
    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Off-policy correction: importance weight of the proximal policy against the behaviour policy, if they differ:
    truncate (at correction_high; truncated importance sampling) | mask (0 outside correction_low to correction_high) |
    none | auto (truncate; with second_moment the weight is not truncated)."""
    correction_level: Literal["token", "geometric", "sequence"] = "token"
    """Importance weight of the correction per token | geometric (geometric mean over the sample) | sequence (product
    over the sample)."""
    correction_low: Amount = 0.5
    """Lower bound of the correction's importance weight, for correction=mask."""
    correction_high: Positive = 2.0
    """Upper bound of the correction's importance weight."""
    second_moment: Amount = 0.0
    """M2PO: mask the tokens with the largest squared log-ratio until the mean square of the rest is at most this; 0.04
    in the paper. 0: off."""
    reject: Literal["none", "divergence", "off_policy"] = "none"
    """Mask whole answers: none | divergence (mean KL between learner and behaviour policy exceeds reject_limit) |
    off_policy (negative advantage, and the policy's log-probs have dropped by more than reject_limit;
    DeepSeek-V3.2)."""
    reject_limit: Amount = 0.1
    """Threshold of algorithm.reject, mean per token [nats]."""
    teacher: str = ""
    """Teacher with the same tokenizer, for on-policy distillation: adds teacher_coef x (teacher's log-prob - policy's)
    to each token's advantage. A model in the forms of model.path, a server as http://host:port/v1/completions#MODEL, or
    self (the policy itself, with algorithm.hint in its prompt). Empty: none."""
    teachers: list[str] = field(default_factory=list[str])
    """Several teachers instead of one, as name=model; each row names its teacher in the column teacher_column. Models
    as for algorithm.teacher, except self."""
    teacher_column: str = "teacher"
    """Column that names the row's teacher in algorithm.teachers; with env=mixture, env selects the teacher by
    environment name."""
    teacher_coef: Amount = 1.0
    """Coefficient of the teacher's term in the advantage or in the loss."""
    teacher_divergence: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "sampled"
    """Comparison with the teacher: sampled (log-prob of the sampled token, in the advantage) | over the vocabulary, in
    the loss: reverse_kl (KL(policy || teacher)) | forward_kl (KL(teacher || policy)) | jsd (generalised Jensen-Shannon,
    GKD)."""
    teacher_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """For jsd: weight of the teacher in the mixture. Near 0 it behaves like forward_kl, near 1 like reverse_kl."""
    teacher_top_k: Whole = 0
    """Compute the divergence over the teacher's k most likely tokens, with all other tokens merged into one. 0: over
    the whole vocabulary, which a teacher behind a server does not support."""
    teacher_rate: Share = 1.0
    """With algorithm.teacher=self, update rate of the teacher's weights towards the policy after each optimizer step: 1
    (the current policy) | 0 (the initial weights) | in between: an exponential moving average."""
    hint: list[str] = field(default_factory=list)
    """Extra text in the teacher's prompt, as in ["A right answer: {answer}"]. A name in braces is a column of the row,
    sibling (another, correct answer of the same group) or feedback (what a reward function logged for this answer with
    log_extra). The first text whose names all have values is used; an answer without one is not compared with the
    teacher."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of new prompts (DAPO)."""
    max_refill: Amount = 4.0
    """Limit of dynamic_sampling: extra groups per step, as a multiple of rollout.prompts. After that the step continues
    with the groups it has."""
    overlong_buffer: Whole = 0
    """Soft overlong penalty (DAPO): over the last n tokens before rollout.max_tokens the penalty grows linearly from 0
    to overlong_penalty [tokens]. 0: off."""
    overlong_penalty: Amount = 1.0
    """Penalty of an answer that uses the whole overlong_buffer."""
    length_penalty: Amount = 0.0
    """Weight of a length reward within each group: short correct answers gain, long answers lose (Kimi k1.5). 0:
    off."""
    mask_truncated: bool = False
    """Do not train on answers that were cut at the length limit; they still count in the baseline."""
    updates_per_batch: Count = 1
    """Optimizer steps per pass over a batch of rollouts; the groups of the batch are split among them."""
    passes: Count = 1
    """Passes over each batch of rollouts (PPO epochs)."""
    router_replay: Literal["none", "rollout"] = "none"
    """Expert routing of a mixture-of-experts model in training: none (its routers choose again) | rollout (replay the
    experts that the engine used; R3, arXiv:2510.11370)."""


@dataclass(kw_only=True)
class Critic(Section):
    path: str = ""
    """Model that the critic is initialised from, in the forms of model.path. Empty: the policy's initial weights."""
    shared: bool = False
    """Put the value head on the policy's backbone and train both together, instead of a separate critic model."""
    lr: Share = 1e-5
    """Learning rate of a separate critic."""
    coef: Amount = 0.5
    """Coefficient of the value loss that is added to the policy loss, for a shared critic."""
    clip: Amount = 0.2
    """Value clip range: values that move further than this from the old ones within a batch get no gradient. 0: off."""
    gamma: Share = 1.0
    """Discount factor of later rewards (gamma)."""
    lam: Share = 0.95
    """Lambda of GAE: 1 relies on the rewards only, 0 on the critic only."""
    lam_alpha: Amount = 0.0
    """Length-adaptive GAE: advantages use lambda = 1 - 1 / (lam_alpha x tokens of the sample), returns use lambda = 1.
    0: off, use lam."""
    whiten: bool = True
    """Normalise the step's advantages to mean 0 and standard deviation 1."""
    freeze_steps: Whole = 0
    """Number of first steps that train only a separate critic, towards returns with lambda 1 (value pretraining of
    VC-PPO)."""
    passes: Count = 1
    """Updates of a separate critic per update of the policy."""
    freeze_attention: bool = False
    """Freeze the attention layers of a separate critic."""
