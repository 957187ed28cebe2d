"""Configuration keys of the learner, the optimizer, checkpoints and trackers."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Amount, Count, Decay, Positive, Processes, Section, Share, Wait, Whole


@dataclass(kw_only=True)
class Optimizer(Section):
    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """Optimizer: adamw | adamw8bit (both moments of large matrices in 8 bits: 2.03 bytes per parameter instead of 8) |
    muon (Muon for hidden matrices, AdamW for all other weights)."""
    lr: Share = 1e-6
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant | linear | cosine."""
    warmup_steps: Whole = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of linear and cosine, as a share of lr."""
    beta1: Decay = 0.9
    """Decay rate of the first moment (AdamW) or of the momentum (Muon, usually 0.95)."""
    beta2: Decay = 0.999
    """Decay rate of the second moment (AdamW)."""
    eps: Positive = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay, for matrices only."""
    max_grad_norm: Amount = 1.0
    """Clip the global gradient norm to this. 0: no clipping."""
    offload: Literal["none", "cpu"] = "none"
    """Memory of the float32 master weights and AdamW's state: none (on the model's device) | cpu (CPU memory, for a
    learner on an accelerator)."""


@dataclass(kw_only=True)
class Lora(Section):
    rank: Whole = 0
    """LoRA rank. 0: train all weights."""
    alpha: Positive = 32.0
    """LoRA scaling: the adapter's update of a weight is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers with an adapter, by name as in peft (q_proj, layers.0.mlp.up_proj), or all-linear: all except the
    head. All other weights are frozen."""
    dora: bool = False
    """DoRA: also train the magnitude of each row of a weight."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """QLoRA: storage of the base weights of linear layers, except the head: none (model.dtype) | nf4 (4 bits) | int8 (8
    bits). Engine and learner compute with the same dequantised weights."""


@dataclass(kw_only=True)
class League(Section):
    """Pool of earlier versions of the policies to play against; an environment selects one as NAME@past."""

    every: Whole = 0
    """Add the current policies to the pool every n steps. 0: no pool."""
    size: Count = 4
    """Size of the pool: the newest versions are kept, and each group plays against a random one. Until the pool is
    full, the initial model fills it up."""

    @property
    def kept(self) -> int:
        return self.size if self.every else 0


@dataclass(kw_only=True)
class Compute(Section):
    """Keys of every learner."""

    tokens_per_microbatch: Count = 4096
    """Maximum number of tokens in a micro-batch [tokens]. A micro-batch is one forward and backward pass; it bounds the
    memory, never the result. Per process with parallel.cp or parallel.tp."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_aux_coef: Amount = 0.0
    """Coefficient of the load-balancing loss of a mixture-of-experts model, over all tokens of an optimizer step
    (Switch Transformer, arXiv:2101.03961); costs one more forward pass. 0: off."""


@dataclass(kw_only=True)
class Learner(Compute):
    max_logprob_gap: Amount = 0.0
    """Stop the run if the mean |engine log-prob - learner log-prob| of a batch exceeds this, because the engine then
    samples from wrong weights [nats]. 0: by model.dtype, 0.002 for float32 and 0.5 for bfloat16; also 0.5 if
    engine.recompute_kv=false keeps the KV cache of older weights."""


@dataclass(kw_only=True)
class Parallel(Section):
    """Parallelism of the learner: ddp x fsdp x cp x tp processes."""

    ddp: Processes = 1
    """Data-parallel copies of the learner. Each has its own samples; gradients are summed."""
    fsdp: Processes = 1
    """Processes that share weights and gradients (FSDP2). Weights, gradients and optimizer state are sharded over them;
    each has its own samples."""
    cp: Processes = 1
    """Context parallelism: processes that each packed row of tokens is split over."""
    tp: Processes = 1
    """Tensor parallelism: processes that each layer is split over."""
    sequence: bool = True
    """Sequence parallelism with tp: between attention and MLP each process holds T / tp of the T packed tokens, which
    saves memory."""
    context: Literal["gather", "ulysses"] = "gather"
    """Attention with cp: gather (all-gather of keys and values) | ulysses (all-to-all: each process computes some heads
    over all tokens; cp must divide the number of heads)."""
    ep: Processes = 1
    """Expert parallelism: number of the fsdp x cp processes that a mixture-of-experts model's experts are split over;
    must divide both this product and the number of experts."""
    timeout: Wait = 600.0
    """Timeout of one process waiting for another [s]; then the run stops."""

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
    """Number of newest checkpoints to keep. 0: all."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation score."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues; needs CPU memory for a copy of the saved state."""
    store: str = ""
    """URL of an object store to copy each checkpoint to: s3://bucket/prefix, file:///mnt/x, or any fsspec URL. A run
    with an empty folder resumes from there. Empty: none."""


@dataclass(kw_only=True)
class Reports(Section):
    """Keys of the logs and trackers of every run."""

    console: Literal["live", "plain", "off", "auto"] = "auto"
    """Console output: live (redrawn panel) | plain (one line per step) | off | auto (live in a terminal, else
    plain)."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: off | offline | online. offline writes into the run folder, for `wandb sync`. Needs `pip
    install birl[wandb]`."""
    mlflow: Literal["off", "offline", "online"] = "off"
    """MLflow: off | offline (a database in the run folder) | online (the server of MLFLOW_TRACKING_URI). Needs `pip
    install birl[mlflow]`."""
    trackio: Literal["off", "offline", "online"] = "off"
    """Trackio: off | offline (a database in the run folder) | online (Trackio's own folder on this machine, or the
    Space of TRACKIO_SPACE_ID). Needs `pip install birl[trackio]`."""
    swanlab: Literal["off", "offline", "online"] = "off"
    """SwanLab: off | offline (into the run folder, for `swanlab sync`) | online. Needs `pip install birl[swanlab]`."""
    report: bool = True
    """Write report.html at the end."""
    trace: bool = True
    """Write a trace of all activities with their times to trace.json, for `birl trace` and the timeline of `birl
    view`."""


@dataclass(kw_only=True)
class Track(Reports):
    rollouts: bool = True
    """Write every episode with its tokens, log-probs and advantage to rollouts.jsonl."""
    token_figures: bool = True
    """Also write the entropy of each trained token and the difference between learner and engine log-prob there: 6 to
    14 bytes per token."""
    record: bool = False
    """Write every step with all digits to record.jsonl, for debug.replay."""


@dataclass(kw_only=True)
class Debug(Section):
    replay: str = ""
    """Folder of a recorded run (track.record): train on its recorded rollouts instead of sampling, and stop at the
    first metric that differs."""
    resample: bool = False
    """With replay, also sample every recorded answer again under its weights version, and compare tokens and log-probs
    bit for bit. For runs with the embedded engine or birl's servers, in bfloat16 on birl's kernels."""
    only_rollout: bool = False
    """Rollouts only: sample, compute rewards and log, without training."""


@dataclass(kw_only=True)
class HeldOut(Section):
    every: Whole = 50
    """Validate every n steps and at the end. 0: never."""
    at_start: bool = True
    """Also validate before the first step."""


@dataclass(kw_only=True)
class Ranking(Section):
    centering: Amount = 0.0
    """Weight of a loss that keeps scores around 0; usually 0.01. The loss is (score of chosen + score of rejected)^2
    (arXiv:2312.09244). 0: off."""


@dataclass(kw_only=True)
class Distill(Section):
    teacher: str = ""
    """Teacher with the same tokenizer, for off-policy distillation on the rows' answers, in the forms of model.path.
    Empty: none."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "forward_kl"
    """Divergence from the teacher over the vocabulary: reverse_kl (KL(learner || teacher)) | forward_kl (KL(teacher ||
    learner)) | jsd (generalised Jensen-Shannon, GKD)."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """For jsd: weight of the teacher in the mixture. Near 0 it behaves like forward_kl, near 1 like reverse_kl."""
    top_k: Whole = 0
    """Compute the divergence over the teacher's k most likely tokens, with all others merged into one. 0: over the
    whole vocabulary."""
    nll_coef: Amount = 0.0
    """Coefficient of the SFT loss (mean negative log-likelihood of the rows' tokens), added to the divergence. 0:
    divergence only."""


@dataclass(kw_only=True)
class Preference(Section):
    loss: Literal["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "dpo"
    """dpo | ipo | hinge | robust | simpo | orpo | kto. Conservative DPO is dpo with label_smoothing above 0."""
    beta: Positive = 0.1
    """Strength of the pull to the reference model. This is for dpo, ipo, hinge, robust and kto; in simpo, beta scales
    the margin (about 2), in orpo it weighs the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels, for dpo (conservative DPO) and robust."""
    margin: Amount = 0.0
    """SimPO's target margin between the mean log-probs (gamma), in units of beta times nats; 0.5 to 1.5 in the
    paper."""
    nll_coef: Amount = 0.0
    """Coefficient of the chosen answer's mean negative log-likelihood, added to the loss. ORPO always includes it, with
    1. 0: off."""
    desirable_weight: Amount = 1.0
    """KTO: weight of good answers."""
    undesirable_weight: Amount = 1.0
    """KTO: weight of bad answers."""
    reference: Literal["live", "precomputed", "none"] = "live"
    """Reference model's log-probs: live (from a frozen copy of the initial weights) | precomputed (once before the
    first step, saved in the run folder; no second model in memory) | none (reference-free: taken as equal for both
    answers). simpo and orpo use none."""
