"""What the learner does, and what a run keeps and tells."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Amount, Count, Decay, Positive, Processes, Section, Share, Wait, Whole


@dataclass(kw_only=True)
class Optimizer(Section):
    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw | adamw8bit (both moments of large matrices in 8 bits: 2.03 bytes a parameter instead of 8) | muon (hidden
    matrices by Muon, all else by AdamW)."""
    lr: Share = 1e-6
    """Peak learning rate. Muon's steps have the size of AdamW's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant | linear | cosine."""
    warmup_steps: Whole = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Share = 0.0
    """Where linear and cosine end, as a share of lr."""
    beta1: Decay = 0.9
    """AdamW's and Muon's decay of the gradient's mean; 0.95 is usual for Muon."""
    beta2: Decay = 0.999
    """AdamW's decay of the squared gradient's mean."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: Amount = 0.0
    """AdamW's decoupled weight decay; matrices only."""
    max_grad_norm: Amount = 1.0
    """Clip the global gradient norm to this. 0: do not clip."""
    offload: Literal["none", "cpu"] = "none"
    """Where the float32 weights and AdamW's state are: none (beside the weights) | cpu (in CPU memory, for a learner on
    an accelerator)."""


@dataclass(kw_only=True)
class Lora(Section):
    rank: Whole = 0
    """LoRA rank. 0: train all weights."""
    alpha: Positive = 32.0
    """LoRA's update of a weight is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that are trained, by name as in peft (q_proj, layers.0.mlp.up_proj), or all-linear: every one but
    the head. All else is frozen."""
    dora: bool = False
    """Train the length of every row of a weight apart from its direction (DoRA)."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """How linear layers' own weights are held, all but the head's (QLoRA): none (in model.dtype) | nf4 (in 4 bits) |
    int8 (in 8 bits). Engine and learner compute with the same numbers."""


@dataclass(kw_only=True)
class League(Section):
    """Earlier versions of the policies, to play against; an environment names one NAME@past."""

    every: Whole = 0
    """Keep the policies as they are after every so many steps. 0: never, and there is nothing to play against."""
    size: Count = 4
    """Versions that are kept, the newest ones; a group plays against one of them, by chance. Before so many are kept,
    the others are the model that the run began with."""

    @property
    def kept(self) -> int:
        return self.size if self.every else 0


@dataclass(kw_only=True)
class Compute(Section):
    """What every learner has."""

    tokens_per_microbatch: Count = 4096
    """Most tokens of one forward and backward pass [tokens]. Bounds the memory, never changes the result; with
    parallel.cp or parallel.tp it is per process."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_aux_coef: Amount = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model, over all tokens of an optimizer step (Switch
    Transformer, arXiv:2101.03961); costs one more forward pass. 0: none."""


@dataclass(kw_only=True)
class Learner(Compute):
    max_logprob_gap: Amount = 0.0
    """Stop when the mean |engine log-prob - learner log-prob| of a batch exceeds this [nats]; then the engine samples
    from other weights than it says. 0: by model.dtype, 0.002 for float32 and 0.5 for bfloat16; 0.5 also where
    engine.recompute_kv=false keeps keys and values of older weights."""


@dataclass(kw_only=True)
class Parallel(Section):
    """How many processes train together, and what each does: ddp x fsdp x cp x tp of them."""

    ddp: Processes = 1
    """Copies of the learner, each with its own samples; gradients are summed."""
    fsdp: Processes = 1
    """Processes that share weights and gradients (FSDP2). Weights, gradients and optimizer state are split over them,
    and each has its own samples."""
    cp: Processes = 1
    """Processes that every packed row of tokens is split over (context parallelism)."""
    tp: Processes = 1
    """Processes that every layer is split over (tensor parallelism)."""
    sequence: bool = True
    """With tp: between attention and MLP each of its processes has T / tp of the T packed tokens, for less memory."""
    context: Literal["gather", "ulysses"] = "gather"
    """How tokens see those of the other cp processes: gather (keys and values of all come to each) | ulysses (each gets
    all tokens of some heads; the heads must be divisible)."""
    ep: Processes = 1
    """Of fsdp x cp processes, how many share out the experts of a mixture-of-experts model (expert parallelism); a
    divisor of both numbers."""
    timeout: Wait = 600.0
    """Longest that a process waits for another one [s]; then the run stops."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.ddp * self.fsdp * self.cp * self.tp

    @property
    def splits(self) -> int:
        """How many processes the tokens of a packed row are split over."""
        return self.cp * (self.tp if self.sequence else 1)

    @property
    def fsdp_cp(self) -> int:
        """How many processes can share out experts."""
        return self.fsdp * self.cp

    @property
    def shares(self) -> int:
        """How many processes have samples of their own."""
        return self.ddp * self.fsdp


@dataclass(kw_only=True)
class Checkpoint(Section):
    every: Whole = 10
    """Save every n steps, and always at the end. 0: only at the end."""
    keep_last: Whole = 2
    """How many of the newest to keep. 0: all."""
    keep_best: bool = True
    """Also keep the one with the best validation score."""
    asynchronous: bool = True
    """Write in the background while training goes on. Takes CPU memory for a copy of what is saved."""
    store: str = ""
    """URL of an object store that gets a copy of every checkpoint: s3://bucket/prefix, file:///mnt/x, or what
    else fsspec knows. A run whose folder is empty goes on from there."""


@dataclass(kw_only=True)
class Reports(Section):
    """What every run tells."""

    console: Literal["live", "plain", "off", "auto"] = "auto"
    """live (redrawn panel) | plain (one line a step) | off | auto (live in a terminal, else plain)."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: off | offline | online. Offline writes into the run folder, for `wandb sync`. Needs `pip
    install birl[wandb]`."""
    mlflow: Literal["off", "offline", "online"] = "off"
    """MLflow: off | offline (a database in the run folder) | online (the store that MLFLOW_TRACKING_URI names). Needs
    `pip install birl[mlflow]`."""
    trackio: Literal["off", "offline", "online"] = "off"
    """Trackio: off | offline (a database in the run folder) | online (Trackio's own folder on this machine, or the
    Space that TRACKIO_SPACE_ID names). Needs `pip install birl[trackio]`."""
    swanlab: Literal["off", "offline", "online"] = "off"
    """SwanLab: off | offline (into the run folder, for `swanlab sync`) | online. Needs `pip install birl[swanlab]`."""
    report: bool = True
    """Write report.html at the end."""
    trace: bool = True
    """Write who did what from when to when to trace.json, for `birl trace` and the timeline of `birl view`."""


@dataclass(kw_only=True)
class Track(Reports):
    rollouts: bool = True
    """Write every episode with its tokens, log-probs and advantage to rollouts.jsonl."""
    token_figures: bool = True
    """Write there also, of each trained token, its entropy and how far the learner's log-prob is from the engine's:
    6 to 14 bytes a token."""
    record: bool = False
    """Write every step with all digits to record.jsonl, for debug.replay."""


@dataclass(kw_only=True)
class Debug(Section):
    replay: str = ""
    """Folder of a run that was recorded (track.record): train on what it trained on, and stop at the first figure that
    comes out otherwise. Nothing is sampled."""
    resample: bool = False
    """With replay: also sample every recorded answer again, under the weights that it came from, and compare tokens and
    log-probs bit for bit. For runs of the embedded engine or of birl's servers, in bfloat16 on birl's kernels."""
    only_rollout: bool = False
    """Rollouts only: sample, compute rewards and log, without training."""


@dataclass(kw_only=True)
class HeldOut(Section):
    every: Whole = 50
    """Validate every n steps and at the end. 0: never."""
    at_start: bool = True
    """Measure before the first step as well."""


@dataclass(kw_only=True)
class Ranking(Section):
    centering: Amount = 0.0
    """Weight of a loss that keeps scores around 0; 0.01 is usual. The loss is (score of chosen + score of
    rejected)^2 (arXiv:2312.09244)."""


@dataclass(kw_only=True)
class Distill(Section):
    teacher: str = ""
    """Model of the same vocabulary to learn from on the rows' own answers (off-policy distillation), in the forms of
    model.path. Empty: none."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "forward_kl"
    """What the teacher is compared by, over all tokens: reverse_kl (learner to teacher) | forward_kl (teacher to
    learner) | jsd (generalised Jensen-Shannon, GKD)."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of jsd, the teacher's share of the mixture: towards 0 it goes like forward_kl, towards 1 like reverse_kl."""
    top_k: Whole = 0
    """Compare the teacher's k most likely tokens, and all others as one. 0: all tokens, one by one."""
    nll_coef: Amount = 0.0
    """Weight of the rows' own tokens beside the divergence: of their mean negative log-likelihood."""


@dataclass(kw_only=True)
class Preference(Section):
    loss: Literal["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "dpo"
    """dpo | ipo | hinge | robust | simpo | orpo | kto. Conservative DPO is dpo with a label_smoothing."""
    beta: Positive = 0.1
    """Beta: strength of the pull towards the reference. That is for dpo, ipo, hinge, robust and kto; scale of the
    margin (simpo, about 2) or weight of the odds ratio (orpo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose order is believed to be wrong, for dpo (then conservative DPO) and robust."""
    margin: Amount = 0.0
    """SimPO's target margin between the mean log-probs, in units of beta times nats (gamma; 0.5 to 1.5 in the
    paper)."""
    nll_coef: Amount = 0.0
    """Weight of the mean negative log-likelihood of the chosen answer, added to the loss. ORPO always has it, with
    weight 1."""
    desirable_weight: Amount = 1.0
    """KTO's weight of good answers."""
    undesirable_weight: Amount = 1.0
    """KTO's weight of bad answers."""
    reference: Literal["live", "precomputed", "none"] = "live"
    """Log-probs of the first weights: live (a frozen copy computes them) | precomputed (once, before the first step,
    then kept in the run folder; no second model in memory) | none (reference-free: as if they were equal). simpo and
    orpo have none."""
