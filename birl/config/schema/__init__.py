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
    """Configurations with a learner and processes that a packed row is split over."""

    learner: Compute
    parallel: Parallel

    @property
    def capacity(self) -> int:
        """Most tokens of a packed row: learner.tokens_per_microbatch on each process that it is split over."""
        return self.learner.tokens_per_microbatch * self.parallel.splits


@dataclass(kw_only=True)
class Training(Splits):
    """Keys of all training runs."""

    run: str = ""
    """Output folder of the run. Empty: runs/<model>-<data>-<preset or command>-<seed>."""
    resume: Literal["auto", "never"] | str = "auto"
    """auto (resume from the newest checkpoint of the run folder, if there is one) | never (refuse a run folder in use)
    | a checkpoint folder, or its URL on an object store, to resume from."""
    steps: Whole = 0
    """Number of training steps. 0: set by `epochs`. A step is one batch of rollouts, or of rows."""
    epochs: Count = 1
    """Passes over the training data if steps is 0."""
    seed: Seed = 0
    """Seed of data order, sampling and initialisation."""
    threads: Threads = 0
    """CPU threads for computation. 0: OMP_NUM_THREADS, else one per core that this process may use."""


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
    """Names of several policies that act in episodes, as in [planner,worker]: each has its own LoRA adapter and
    optimizer over model.path. The environment selects the policy of each turn (docs/agents.md). Empty: one policy,
    without a name."""
    league: League = field(default_factory=League)
    learner: Learner = field(default_factory=Learner)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)
    debug: Debug = field(default_factory=Debug)
    watchdog: Deadline = 1800.0
    """Stop the run after this time without progress, and print what each process waits for [s]. 0: off."""

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.rollout.prompts * self.rollout.group_size


@dataclass(kw_only=True)
class Stage(Training):
    """Keys of SFT, RM and DPO."""

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
    """Normalisation of the summed loss: token (mean over all trained tokens of the step) | sequence (mean per row, then
    over rows)."""


@dataclass(kw_only=True)
class RM(Stage):
    """Train a reward model on pairs of answers: `birl rm`."""

    data: RankedPairs = field(default_factory=RankedPairs)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))
    ranking: Ranking = field(default_factory=Ranking)


@dataclass(kw_only=True)
class DPO(Stage):
    """Preference optimisation on pairs of answers: `birl dpo`."""

    data: LabelledPairs = field(default_factory=LabelledPairs)
    preference: Preference = field(default_factory=Preference)


@dataclass(kw_only=True)
class Eval(Section):
    """Evaluate a model on data: `birl eval`."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    env: Env = field(default_factory=Env)
    validation: Validation = field(default_factory=Validation)
    reward: Reward = field(default_factory=Reward)
    sandbox: Sandbox = field(default_factory=Sandbox)
    engine: Engine = field(default_factory=Engine)
    output: str = ""
    """JSON file to write results and all answers to. Empty: print the results only."""
    baseline: str = ""
    """JSON file from `birl eval output=FILE` on the same questions, to compare with: prints the change, its 95 %
    confidence interval and the p-value, paired by prompt. Empty: none."""
    seed: Seed = 0
    """Seed of sampling."""
    threads: Threads = 0
    """CPU threads for computation. 0: OMP_NUM_THREADS, else one per core that this process may use."""


@dataclass(kw_only=True)
class Serve(Section):
    """Serve a model over HTTP, for OpenAI clients and as an inference engine of training runs: `birl serve`."""

    model: Model = field(default_factory=Model)
    engine: Generation = field(default_factory=Generation)
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback need a token in the environment variable BIRL_TOKEN."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on. 0: a free port, which is printed."""
    name: str = ""
    """Name to register, as experiment/trial. Other processes of this user look up its address in the cache folder.
    Empty: not registered."""
    served_name: str = ""
    """Model name in the API. Empty: the last part of model.path."""
    max_request_mb: Annotated[float, Field(gt=0, le=1000000)] = 32.0
    """Maximum size of a request, weight uploads excluded [MiB]."""
    max_waiting: Whole = 1024
    """Queue limit: answers waiting beyond engine.max_batch. Further requests are refused with HTTP 429."""
    request_timeout: Wait = 600.0
    """Timeout of a request, queueing included [s]; then it is aborted with HTTP 504."""
    volume: str = ""
    """Folder to load new weights from. A run with weights.method=volume writes them there. Empty: weights are loaded
    only when a client sends them."""
    drain_timeout: Deadline = 30.0
    """Time limit for running requests at shutdown [s]."""
    seed: Seed = 0
    """Seed of requests that set none. It is combined with the request's number since the start. 0: from the system."""
    threads: Threads = 0
    """CPU threads for computation. 0: OMP_NUM_THREADS, else one per core that this process may use."""


@dataclass(kw_only=True)
class Tinker(Section):
    """Training service for Tinker clients, with many tenants on one base model: `birl tinker`."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    folder: str = "tinker"
    """Folder of sessions, adapters, checkpoints and audit. It also holds optimizer states."""
    names: list[str] = field(default_factory=list)
    """Model names that clients may use, besides its own."""
    keys: str = ""
    """File of tenants, one name and API key per line. Only its owner may have access to it. The environment variable
    BIRL_TINKER_KEYS may hold further "name key" pairs, comma-separated. With neither, all clients are one tenant, and
    any key is accepted."""
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback need keys."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on. 0: a free port, which is printed."""
    engines: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of `birl serve` processes that sample. Each loads the model and has its own max_batch. 0: sample in this
    process."""
    max_batch: Count = 64
    """Maximum number of answers sampled at once."""
    kv_cache_gb: Size = 0.0
    """Memory of the KV cache [GiB]. 0: half of the free memory, at most what max_batch answers can fill."""
    tokens_per_pass: Count = 4096
    """Tokens per training pass, shared by tenants. More tokens are faster and need more memory."""
    max_rank: Count = 128
    """Maximum LoRA rank of an adapter."""
    adapters_gb: Annotated[float, Field(gt=0, le=1e6)] = 4.0
    """Memory of adapters in training [GiB]. Adapters that wait longest are moved to disk. Sampling uses the same amount
    again."""
    idle_timeout: Wait = 600.0
    """Idle time after which an adapter is moved to disk [s]."""
    quota_sessions: Count = 256
    """Sessions per tenant. A session ends when its program closes it or sends no heartbeat for ten minutes; then it
    makes room for new ones."""
    quota_runs: Count = 64
    """Training runs per tenant. Runs of ended sessions make room for new ones; their checkpoints are kept."""
    quota_samplers: Count = 4096
    """Sampling sessions per tenant. Those of ended sessions make room for new ones."""
    quota_requests: Count = 4096
    """Waiting and running requests per tenant."""
    quota_tokens: Count = 10000000
    """Tokens in the waiting and running requests of a tenant."""
    quota_checkpoints: Count = 4096
    """Checkpoints per tenant, including the weights of sampling sessions."""
    quota_gb: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Disk space of a tenant's checkpoints [GiB]."""
    max_request_mb: Annotated[float, Field(gt=0, le=1000000)] = 64.0
    """Maximum size of a request [MiB]."""
    drain_timeout: Deadline = 30.0
    """Time limit for running computations at shutdown [s]."""
    threads: Threads = 0
    """CPU threads for computation. 0: OMP_NUM_THREADS, else one per core that this process may use."""


Config = RL | Stage | Eval | Serve | Tinker


def reward_functions(config: RL | Eval) -> list[str]:
    """Those that judge answers: by default none where an environment does."""
    return config.reward.functions or ["math"] * (config.env.kind == "single_turn")


#: what `birl COMMAND` reads its words into
TRAINING: dict[str, type[Any]] = {"sft": SFT, "rm": RM, "dpo": DPO, "rl": RL}
COMMANDS: dict[str, type[Any]] = {**TRAINING, "eval": Eval, "serve": Serve, "tinker": Tinker}
