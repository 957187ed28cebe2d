"""What a run of reinforcement learning minimises."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Amount, Count, Function, Positive, Real, Section, Share, Whole


@dataclass(kw_only=True)
class Algorithm(Section):
    advantage: (
        Literal["relative", "gdpo", "pass_at_k", "best_and_worst", "zero", "returns", "gae", "turn_gae"] | Function
    ) = "relative"
    """How rewards become advantages: relative (to algorithm.baseline, over algorithm.scale_rewards) | gdpo (each reward
    function normalised by itself) | pass_at_k | returns (the reward less the KL from each token on, normalised over all
    tokens, REINFORCE++) | gae | turn_gae (a critic, by token or by turn) | best_and_worst (pairs for online_dpo) |
    zero (the teacher alone) | my_file.py:my_function."""
    advantage_args: list[str] = field(default_factory=list)
    """Options of that function, as name=value."""
    baseline: Literal["group", "leave_one_out", "batch", "optimal", "greedy", "none"] = "group"
    """What is subtracted from each reward: group (mean of the prompt's episodes) | leave_one_out (mean of the others,
    RLOO) | batch (mean of all) | optimal (mean weighted by length, OPO) | greedy (reward of the greedy
    answer, ReMax) | none."""
    scale_rewards: Literal["none", "group", "batch", "rewards", "mean"] = "none"
    """What each advantage is divided by: none (Dr. GRPO) | group (std of the group, GRPO) | batch (std of all
    advantages) | rewards (std of all rewards, Lite PPO) | mean (mean reward of the group, MaxRL)."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """How reward is credited to turns: trajectory (all turns of the episode alike) | turn (each turn gets the reward
    from it on, compared with the same turn of the group's other episodes)."""
    turn_discount: Share = 1.0
    """For algorithm.credit=turn: what a reward counts one turn earlier."""
    pass_k: Count = 4
    """The k that algorithm.advantage=pass_at_k trains for."""
    surrogate: (
        Literal["clip", "gspo", "gmpo", "cispo", "sapo", "reinforce", "importance", "dppo", "online_dpo"] | Function
    ) = "clip"
    """The policy's loss of a token: clip (PPO) | gspo | gmpo | cispo | sapo | dppo | reinforce (no ratio) | importance
    (not bounded) | online_dpo | my_file.py:my_function."""
    surrogate_args: list[str] = field(default_factory=list)
    """Options of that function that are no keys here, as name=value: [tau_positive=1.0,tau_negative=1.05] of sapo,
    [divergence=tv,threshold=0.15] of dppo, [beta=0.1] of online_dpo."""
    clip_low: Amount = 0.2
    """Importance ratios below 1 - clip_low give no gradient when the advantage is negative (PPO)."""
    clip_high: Amount = 0.2
    """Importance ratios above 1 + clip_high give no gradient when the advantage is positive; 0.28 in DAPO."""
    dual_clip: Amount = 0.0
    """Bound of the loss of a token with a negative advantage, in units of it; 3 is usual. 0: none."""
    denominator: Literal["token", "sequence", "group", "constant"] = "constant"
    """What the summed loss is divided by: token (all trained tokens) | sequence (mean per answer, then over answers) |
    group (mean per prompt, then over prompts) | constant (answers x rollout.max_tokens, Dr. GRPO)."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of KL(policy || reference): k1 | k2 | k3 | abs (Schulman). Used when kl_coef > 0."""
    kl_coef: Amount = 0.0
    """Weight of the KL term. Above 0 a frozen copy of the first weights is kept as the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: loss | reward (taken from each token's reward with returns or a critic, else from the
    episode's)."""
    kl_corrected: bool = False
    """Multiply the KL in the loss by the importance ratio, which makes its gradient unbiased (DeepSeek-V3.2)."""
    kl_target: Amount = 0.0
    """Steer kl_coef so that the KL of an answer stays near this [nats]. 0: kl_coef is fixed."""
    kl_horizon: Count = 10000
    """How slowly kl_coef is steered [episodes]."""
    entropy_coef: Amount = 0.0
    """Weight of an entropy bonus."""
    observation_coef: Amount = 0.0
    """Weight of the cross-entropy of what environments and tools answer between the model's turns, beside the policy's
    loss and by the same denominator (ECHO; 0.05 in the paper)."""
    entropy_control: Literal["none", "top_entropy", "clip_cov", "kl_cov"] = "none"
    """Which tokens are left out or held back, to keep the entropy up: none | top_entropy (only those of high entropy
    are trained) | clip_cov (some with a high covariance of log-prob and advantage are not) | kl_cov (those with the
    highest are held back towards the old policy)."""
    entropy_share: Share = 0.2
    """Share of the step's tokens that entropy_control chooses; 0.2 for top_entropy, 0.0002 for the others."""
    covariance_low: Real = 1.0
    """clip_cov chooses among tokens with at least this covariance."""
    covariance_high: Real = 5.0
    """clip_cov chooses among tokens with at most this covariance."""
    held_coef: Amount = 1.0
    """Weight of kl_cov's pull towards the old policy."""
    proximal: Literal["auto", "behaviour", "recompute", "interpolate"] = "auto"
    """The policy that the importance ratio starts from: behaviour (that which sampled) | recompute (the learner's
    before the batch's first update; decoupled PPO) | interpolate (between what sampled and the newest, by age; A-3PO) |
    auto (recompute where rollout.max_staleness > 0, or engine.weights=int8, and the surrogate's paper does not take its
    ratio against what sampled, as gspo, gmpo, cispo, sapo, dppo and second_moment do; else behaviour)."""
    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weight of proximal against behaviour, unless they are the same: truncate (at correction_high) | mask
    (0 outside of its bounds) | none | auto (truncate where the proximal policy is not the behaviour; with
    second_moment the whole weight)."""
    correction_level: Literal["token", "geometric", "sequence"] = "token"
    """The weight is of each token | geometric (mean of the sample's) | sequence (product of the sample's)."""
    correction_low: Amount = 0.5
    """Lower bound for correction=mask."""
    correction_high: Positive = 2.0
    """Upper bound of the weight."""
    second_moment: Amount = 0.0
    """Leave out the tokens whose log-ratio moved most, until the mean square of the others is at most this (M2PO; 0.04
    in the paper). 0: off."""
    reject: Literal["none", "divergence", "off_policy"] = "none"
    """Leave out whole answers: none | divergence (the learner's mean KL to what sampled exceeds reject_limit) |
    off_policy (bad ones that the policy has left behind already, DeepSeek-V3.2)."""
    reject_limit: Amount = 0.1
    """Bound of reject, per token [nats]."""
    teacher: str = ""
    """Model of the same vocabulary to learn from on the policy's own answers (on-policy distillation): each token's
    advantage gains teacher_coef (teacher's log-prob - ours). In the forms of model.path, or the address of a vLLM
    server: http://host:port/v1/completions#MODEL; or self: the policy, as it is with algorithm.hint. Empty: none."""
    teachers: list[str] = field(default_factory=list[str])
    """Several teachers instead of one, as name=model: a row names in teacher_column whose it is. Models in the forms of
    teacher, but not self."""
    teacher_column: str = "teacher"
    """Column of the rows that names one of teachers; with env=mixture it may be env, which names the environment."""
    teacher_coef: Amount = 1.0
    """Weight of the teacher."""
    teacher_divergence: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "sampled"
    """What the teacher is compared by: sampled (its log-prob of each sampled token, in the advantage, as above) | of
    all tokens, in the loss: reverse_kl (learner to teacher) | forward_kl (teacher to learner) | jsd (generalised
    Jensen-Shannon, GKD)."""
    teacher_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of jsd, the teacher's share of the mixture: towards 0 it goes like forward_kl, towards 1 like reverse_kl."""
    teacher_top_k: Whole = 0
    """Compare the teacher's k most likely tokens, and all others as one. 0: all tokens, one by one, which a server does
    not give."""
    teacher_rate: Share = 1.0
    """With algorithm.teacher=self, the share of its way to the policy that the teacher goes after each optimizer step:
    1 (it is the policy as it is now) | 0 (it stays the first weights) | between: a slow average."""
    hint: list[str] = field(default_factory=list)
    """What the teacher sees beside the prompt: a text with names in braces, as in ["A right answer: {answer}"]. A name
    is a column of the row, sibling (a right answer of the same group, not this one) or feedback (what a reward function
    says of this answer by log_extra). Of several texts it is the first of which everything is there; an answer without
    any is not compared with the teacher."""
    dynamic_sampling: bool = False
    """Replace groups in which every reward is the same by new prompts (DAPO)."""
    max_refill: Amount = 4.0
    """Bound on that: at most this many times rollout.prompts extra groups are sampled in a step, which then goes on
    with the groups it has."""
    overlong_buffer: Whole = 0
    """The last n tokens before rollout.max_tokens in which overlong_penalty grows from 0 to its full value (DAPO)
    [tokens]."""
    overlong_penalty: Amount = 1.0
    """Reward taken from an answer that uses the whole buffer. Without effect while overlong_buffer is 0."""
    length_penalty: Amount = 0.0
    """Weight of a reward for short right answers and against long ones, within each group (Kimi k1.5). 0: off."""
    mask_truncated: bool = False
    """Answers cut by the length limit count in the baseline but are not trained on."""
    updates_per_batch: Count = 1
    """Optimizer steps in one pass over a batch of rollouts; the batch is split by groups."""
    passes: Count = 1
    """Passes over each batch of rollouts (PPO's epochs)."""
    router_replay: Literal["none", "rollout"] = "none"
    """Which experts of a mixture-of-experts model compute a token in training: none (those that its routers choose
    then) | rollout (those that computed it in the rollout; R3, arXiv:2510.11370)."""


@dataclass(kw_only=True)
class Critic(Section):
    path: str = ""
    """Model that the critic begins as, in the forms of model.path. Empty: the policy's own first weights."""
    shared: bool = False
    """A value head on the policy's own backbone, trained together with it, instead of a model of its own."""
    lr: Share = 1e-5
    """Learning rate of a critic of its own."""
    coef: Amount = 0.5
    """Weight of the value loss beside the policy's, for a shared critic."""
    clip: Amount = 0.2
    """Values may move at most this far from the old ones in one batch before they lose their gradient. 0: off."""
    gamma: Share = 1.0
    """Discount of later rewards."""
    lam: Share = 0.95
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic alone."""
    lam_alpha: Amount = 0.0
    """Above 0 advantages have a lambda of 1 - 1 / (lam_alpha x tokens of the sample) instead, and returns one of 1."""
    whiten: bool = True
    """Advantages of the step to mean 0 and standard deviation 1."""
    freeze_steps: Whole = 0
    """First steps in which only a critic of its own is trained, towards returns with a lambda of 1 (VC-PPO's
    pretraining of the value model)."""
    passes: Count = 1
    """Updates of a critic of its own for each update of the policy."""
    freeze_attention: bool = False
    """Attention layers of a critic of its own keep their weights."""
