"""Every key that a run understands: type, choices or range, default, unit and meaning, each stated once and here.

The string under each field is its documentation: `birl rl --help all` prints it. A key that nothing reads must not
exist (`tests/config/test_every_key.py` changes each one and looks for the effect).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from birl.config.schema.algorithm import Algorithm, Critic
from birl.config.schema.data import SIGHT, Data, Files, LabelledPairs, Model, Pairs, RankedPairs, Texts
from birl.config.schema.kinds import Count, Deadline, Section, Seed, Size, Threads, Wait, Whole
from birl.config.schema.rollout import Engine, Env, Generation, Reward, Rollout, Sandbox, Validation, Weights
from birl.config.schema.training import (
    Checkpoint,
    Compute,
    Debug,
    Distill,
    HeldOut,
    League,
    Learner,
    Lora,
    Optimizer,
    Parallel,
    Preference,
    Ranking,
    Reports,
    Track,
)


class Splits(Section):
    """What has a learner, and processes that its rows are split over."""

    learner: Compute
    parallel: Parallel

    @property
    def capacity(self) -> int:
        """Most tokens of a packed row: learner.tokens_per_microbatch on each process that it is split over."""
        return self.learner.tokens_per_microbatch * self.parallel.splits


@dataclass(kw_only=True)
class Training(Splits):
    """What all training runs have in common."""

    run: str = ""
    """Folder of the run. Empty: runs/<model>-<data>-<preset or command>-<seed>."""
    resume: Literal["auto", "never"] | str = "auto"
    """auto (go on from the newest checkpoint of this run folder, if any) | never (refuse a folder in use) | a
    checkpoint folder, or its URL on an object store."""
    steps: Whole = 0
    """Training steps: batches of rollouts, or of rows. 0: until data.train was seen `epochs` times."""
    epochs: Count = 1
    """Passes over the training data when steps is 0."""
    seed: Seed = 0
    """Seed of data order, sampling and initialisation."""
    threads: Threads = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class RL(Training):
    """Reinforcement learning: `birl rl`."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    algorithm: Algorithm = field(default_factory=Algorithm)
    env: Env = field(default_factory=Env)
    rollout: Rollout = field(default_factory=Rollout)
    validation: Validation = field(default_factory=Validation)
    reward: Reward = field(default_factory=Reward)
    sandbox: Sandbox = field(default_factory=Sandbox)
    engine: Engine = field(default_factory=Engine)
    weights: Weights = field(default_factory=Weights)
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic: Critic = field(default_factory=Critic)
    lora: Lora = field(default_factory=Lora)
    policies: list[str] = field(default_factory=list)
    """Names of the policies that take part in episodes, as in [planner,worker]: each has a LoRA and an optimizer of its
    own over model.path. The environment says who replies (docs/agents.md). Empty: one policy, without a name."""
    league: League = field(default_factory=League)
    learner: Learner = field(default_factory=Learner)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)
    debug: Debug = field(default_factory=Debug)
    watchdog: Deadline = 1800.0
    """End the run after this long without progress, and print what each process waits for [s]. 0: never."""

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.rollout.prompts * self.rollout.group_size


@dataclass(kw_only=True)
class Stage(Training):
    """What SFT, RM and DPO have in common."""

    model: Model = field(default_factory=Model)
    data: Files = field(default_factory=Files)
    validation: HeldOut = field(default_factory=HeldOut)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora = field(default_factory=Lora)
    learner: Compute = field(default_factory=Compute)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(every=100))
    track: Reports = field(default_factory=Reports)
    batch_size: Count = 32
    """Rows per optimizer step."""


@dataclass(kw_only=True)
class SFT(Stage):
    """Supervised fine-tuning: `birl sft`."""

    data: Texts = field(default_factory=Texts)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=2e-5))
    distill: Distill = field(default_factory=Distill)
    denominator: Literal["token", "sequence"] = "token"
    """What the summed loss is divided by: token (all learned tokens of the step) | sequence (mean per row, then over
    rows)."""


@dataclass(kw_only=True)
class RM(Stage):
    """A reward model from pairs of answers: `birl rm`."""

    data: RankedPairs = field(default_factory=RankedPairs)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))
    ranking: Ranking = field(default_factory=Ranking)


@dataclass(kw_only=True)
class DPO(Stage):
    """Preference optimisation from pairs of answers: `birl dpo`."""

    data: LabelledPairs = field(default_factory=LabelledPairs)
    preference: Preference = field(default_factory=Preference)


@dataclass(kw_only=True)
class Eval(Section):
    """Measure a model on data: `birl eval`."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    env: Env = field(default_factory=Env)
    validation: Validation = field(default_factory=Validation)
    reward: Reward = field(default_factory=Reward)
    sandbox: Sandbox = field(default_factory=Sandbox)
    engine: Engine = field(default_factory=Engine)
    output: str = ""
    """JSON file for the results and all answers. Empty: only printed."""
    baseline: str = ""
    """JSON file that `birl eval output=FILE` wrote for the same questions, to compare with: the change, its 95 %
    interval and p by paired prompts. Empty: none."""
    seed: Seed = 0
    """Seed of sampling."""
    threads: Threads = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class Serve(Section):
    """A model behind HTTP, for OpenAI clients and as an engine of training runs: `birl serve`."""

    model: Model = field(default_factory=Model)
    engine: Generation = field(default_factory=Generation)
    host: str = "127.0.0.1"
    """Address to listen at. Any but this machine's own needs a token, in the environment variable BIRL_TOKEN."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen at. 0: a free one, which is printed."""
    name: str = ""
    """Name to register, as experiment/trial. Other processes of this user find its address in the cache folder. Empty:
    not registered."""
    served_name: str = ""
    """What clients call the model. Empty: the last part of model.path."""
    max_request_mb: Annotated[float, Field(gt=0, le=1000000)] = 32.0
    """Largest request, weights not counted [MiB]."""
    max_waiting: Whole = 1024
    """Most answers that wait while engine.max_batch are being decoded; more are refused with 429."""
    request_timeout: Wait = 600.0
    """Longest a request may take, waiting included [s]; after that it is aborted, with 504."""
    volume: str = ""
    """Folder to load new weights from. A run with weights.method=volume writes them there. Empty: weights are loaded
    only when a client sends them."""
    drain_timeout: Deadline = 30.0
    """Longest wait for running requests at shutdown [s]."""
    seed: Seed = 0
    """Seed of requests that set none. It is combined with their number since the start. 0: from the system."""
    threads: Threads = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class Tinker(Section):
    """Training as a service for Tinker's client, many tenants over one model: `birl tinker`."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    folder: str = "tinker"
    """Folder of sessions, adapters, optimizers, checkpoints and the audit."""
    names: list[str] = field(default_factory=list)
    """Names by which clients ask for the model, beside its own."""
    keys: str = ""
    """File with a tenant's name and key in each line. Only its owner may read it. The environment variable
    BIRL_TINKER_KEYS has "name key" pairs, too, with commas. Neither: one tenant, whatever its key."""
    host: str = "127.0.0.1"
    """Address to listen at. Any but this machine's own needs keys."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at. 0: a free one, which is printed."""
    engines: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes of `birl serve` that sample. Each has the model and max_batch. 0: this one samples."""
    max_batch: Count = 64
    """Most answers that are sampled at once."""
    kv_cache_gb: Size = 0.0
    """Memory for the KV cache [GiB]. 0: half of what is free, at most what max_batch answers can fill."""
    tokens_per_pass: Count = 4096
    """Tokens of one pass of training, which tenants share. More is faster, and takes more memory."""
    max_rank: Count = 128
    """Highest rank of an adapter."""
    adapters_gb: Annotated[float, Field(gt=0, le=1e6)] = 4.0
    """Memory for adapters in training [GiB]. Those that wait longest go to disk. As much again is for sampling."""
    idle_timeout: Wait = 600.0
    """An adapter that is not used for so long goes to disk [s]."""
    quota_sessions: Count = 256
    """Sessions of one tenant. A program's ends when it closes it or is silent for ten minutes; then it makes room."""
    quota_runs: Count = 64
    """Training runs of one tenant. Those of sessions that have ended make room for new ones; their checkpoints stay."""
    quota_samplers: Count = 4096
    """Sampling sessions of one tenant. Those of sessions that have ended make room for new ones."""
    quota_requests: Count = 4096
    """Requests of one tenant that wait or run."""
    quota_tokens: Count = 10000000
    """Tokens in the requests of one tenant that wait or run."""
    quota_checkpoints: Count = 4096
    """Checkpoints of one tenant, with the weights of its sampling sessions."""
    quota_gb: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Checkpoints of one tenant [GiB]."""
    max_request_mb: Annotated[float, Field(gt=0, le=1000000)] = 64.0
    """Largest request [MiB]."""
    drain_timeout: Deadline = 30.0
    """Longest wait for what is being computed at shutdown [s]."""
    threads: Threads = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


Config = RL | Stage | Eval | Serve | Tinker


def reward_functions(config: RL | Eval) -> list[str]:
    """Those that judge answers: by default none where an environment does."""
    return config.reward.functions or ["math"] * (config.env.kind == "single_turn")


#: what `birl COMMAND` reads its words into
TRAINING: dict[str, type[Any]] = {"sft": SFT, "rm": RM, "dpo": DPO, "rl": RL}
COMMANDS: dict[str, type[Any]] = {**TRAINING, "eval": Eval, "serve": Serve, "tinker": Tinker}
