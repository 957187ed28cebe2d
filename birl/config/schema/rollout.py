"""Configuration keys of episodes, rewards, inference engines and weight transfer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from birl.config.schema.kinds import (
    Amount,
    Count,
    Deadline,
    EngineClass,
    Function,
    Nucleus,
    Positive,
    Real,
    Section,
    Share,
    Size,
    Threads,
    Wait,
    Whole,
    Workers,
)


@dataclass(kw_only=True)
class Rollout(Section):
    prompts: Count = 8
    """Prompts per step; each prompt gives one group of episodes."""
    group_size: Count = 8
    """Episodes per prompt (group size)."""
    max_tokens: Count = 256
    """Maximum length of an answer [tokens per turn]."""
    temperature: Amount = 1.0
    """Sampling temperature; the learner's log-probs use it too."""
    top_p: Nucleus = 1.0
    """Nucleus sampling. 1: off. The learner's log-probs are computed over the same tokens
    (docs/algorithms.md#top-p-top-k-and-min-p)."""
    top_k: Whole = 0
    """Sample from the k most likely tokens. 0: off; with top_p or min_p then at most 1,024."""
    min_p: Share = 0.0
    """Drop tokens with less than min_p times the probability of the most likely one. 0: off."""
    stop: list[str] = field(default_factory=list)
    """Stop strings; they remain part of the answer. A text in brackets is written ["[END]"]."""
    failed: Literal["drop", "drop_group"] = "drop"
    """Episodes that end as env_error, engine_error, timeout or aborted: drop (train on the rest of the group) |
    drop_group (drop the whole group)."""
    truncated: Literal["keep", "drop"] = "keep"
    """Answers cut at the length limit: keep (scored and trained like others; see algorithm.mask_truncated) | drop
    (treated like failed episodes)."""
    max_failure_rate: Share = 0.5
    """Stop the run if more than this share of a step's episodes failed."""
    max_staleness: Whole = 0
    """Maximum age of the sampling weights, in steps. 0: synchronous, generation and training alternate. Above 0:
    asynchronous, they overlap; the age counts from the weights version when the group started."""
    order_window: Whole = 0
    """Number of later groups that may be trained before a slow earlier group, so that it does not delay a step; reduces
    the groups that are generated ahead by the same number. At most (max_staleness - weights.sync_every + 1) x prompts.
    0: train groups in order."""
    oversample: Whole = 0
    """Extra episodes per prompt: the first rollout.group_size to finish are used, the others aborted. Avoids
    stragglers, but biases towards short answers."""


@dataclass(kw_only=True)
class Env(Section):
    """`options` are the environment's own keys, as they were written."""

    kind: str = "single_turn"
    """Environment: a task's name or my_file.py:NAME. single_turn (one prompt, one answer) | a task of docs/tasks.md |
    my_file.py:NAME or package.module:NAME: a class with start, step and close, a class with run, a function step(state,
    action, extra_info), or an agent function (docs/environments.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own keys; `birl rl env=NAME --help` lists them. Set them without `options`, as in env.low=1."""
    max_turns: Count = 8
    """Maximum number of model calls per episode; then its outcome is `truncated`."""
    cut_turn: Literal["end", "continue"] = "end"
    """After an answer that was cut at rollout.max_tokens: end (the episode ends as `truncated`) | continue (the
    environment steps as if the answer were complete)."""
    timeout: Wait = 600.0
    """Timeout of an episode, rewards excluded [s]; then its outcome is `timeout`."""
    sampling: Literal["run", "agent"] = "run"
    """Sampling parameters of an agent's OpenAI or Anthropic requests: run (those of rollout or validation; the client's
    are ignored) | agent (the client's temperature, top_p, top_k and min_p; only `birl eval`, because training needs
    log-probs under the run's own parameters)."""
    mcp: list[str] = field(default_factory=list)
    """MCP servers whose tools the model may call in addition to the environment's own: commands (started for each
    episode) or URLs, as in env.mcp=['python server.py','http://127.0.0.1:8000/mcp']."""
    mcp_timeout: Wait = 30.0
    """Timeout of an MCP server's start and of each tool call [s]; then the outcome is env_error."""
    mcp_longest: Count = 8000
    """Maximum length of a tool's result, and of its description, in the prompt [characters]."""
    mcp_sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """Sandbox of the commands in env.mcp: auto (the strongest that works here: no network, and only the files of
    Python, its packages and the command) | bubblewrap | landlock | none (with your network and environment
    variables)."""


@dataclass(kw_only=True)
class Validation(Section):
    every: Whole = 10
    """Validate every n steps; 0: never."""
    at_start: bool = True
    """Also validate before the first step."""
    samples: Count = 1
    """Answers per prompt, from which pass@k is estimated."""
    k: list[Count] = field(default_factory=lambda: [1])
    """Values of k for pass@k; each at most validation.samples."""
    threshold: Amount = 0.0
    """Minimum score of a correct answer, for pass@k. 0: pass@k is reported only if all scores are 0 or 1."""
    temperature: Amount = 0.0
    """Sampling temperature. 0: greedy."""
    top_p: Nucleus = 1.0
    """Nucleus sampling. 1: off."""
    top_k: Whole = 0
    """Sample from the k most likely tokens. 0: off."""
    max_tokens: Whole = 0
    """Maximum length of an answer [tokens]. 0: rollout.max_tokens."""


@dataclass(kw_only=True)
class Reward(Section):
    functions: list[Literal["math", "code", "format", "length", "model", "judge"] | Function] = field(
        default_factory=list
    )
    """Reward functions, such as math or my_file.py:name. math | code (unit tests) | format | length | model (a reward
    model, reward.model) | judge (a language model, reward.judge) | my_file.py:my_function | package.module:function.
    They score the last answer; the result is added to the environment's reward. Empty: math for env.kind=single_turn,
    else only the environment's reward."""
    weights: list[Real] = field(default_factory=list)
    """One weight per reward function; the reward is the weighted sum. Empty: the mean of the functions."""
    timeout: Deadline = 0.0
    """Timeout of a reward call [s]; then the worker is killed and the outcome is `timeout`. 0: 10, with `judge` 120,
    with `code` the time limit of all tests of a group."""
    workers: Workers = 1
    """Processes that compute rewards."""
    format_pattern: str = r"^<think>.*?</think>\s*<answer>.*?</answer>\s*$"
    """Regular expression that the whole answer is searched with, for `format`."""
    model: str = ""
    """Reward model: a folder, a run of `birl rm`, or the address of a server, as http://host:port/pooling."""
    judge: list[str] = field(default_factory=list)
    """Judge models, as http://host:port/v1#MODEL. The servers must offer OpenAI's API; several judges form a panel. The
    environment variable BIRL_REWARD_TOKEN holds the API token: one for all addresses, or one per address,
    comma-separated."""
    judge_mode: Literal["score", "group", "pairs"] = "score"
    """What a judge sees in one request: score (one answer) | group (all answers to a prompt, scored relative to each
    other) | pairs (two answers; the score is the share of pairs that an answer wins)."""
    judge_rounds: Count = 1
    """Number of times a group or a pair is judged, each in another order (from `seed`). With 2, each answer of a pair
    is first once."""
    judge_rubric: list[str] = field(default_factory=list)
    """Scoring criteria, as in "2: It names its source."; the number is the weight, by default 1. A negative weight
    penalises the criterion."""
    judge_rubric_column: str = ""
    """Column of the row's own criteria: a list of such texts, or of objects with a text and a weight. Rows without it
    use reward.judge_rubric."""
    judge_panel: Literal["mean", "median", "majority"] = "mean"
    """How the scores of several judges are combined: mean | median | majority (1 if most judges give at least 0.5, 0 if
    not, 0.5 for a tie)."""
    judge_rate: Amount = 0.0
    """Rate limit of each judge, over all workers [requests per minute]. 0: no limit."""
    judge_prompt: str = ""
    """Text file with the judge's prompt. {prompt}, {completion}, {gold}, {rubric} and {form} (of the reply's last line)
    are filled in. Empty: the built-in prompt."""
    judge_tokens: Count = 512
    """Maximum length of a judge's reply [tokens]."""
    judge_cache: bool = True
    """Cache judge replies in the cache folder, and send the same request only once."""
    concurrency: Count = 8
    """Concurrent requests of each worker to the judge or the reward model's server."""
    length_target: Count = 256
    """`length` is 1 up to this many characters and falls to 0 at twice as many."""
    code_partial: bool = True
    """`code` gives the share of passed tests. False: 1 if all tests passed, else 0."""


@dataclass(kw_only=True)
class Sandbox(Section):
    """Sandbox of programs that the model wrote (reward function `code`)."""

    kind: Literal["auto", "zygote", "bubblewrap", "landlock", "process", "modal"] = "auto"
    """zygote (bubblewrap around a Python process that forks for each run) | bubblewrap (a new one for each run) |
    landlock (no namespaces) | modal (Modal's cloud) | process (no isolation: only for trusted programs) | auto (the
    first of zygote, bubblewrap and landlock that passes a trial run)."""
    workers: Threads = 0
    """Concurrent programs per reward worker. 0: the CPU cores, divided by reward.workers."""
    seconds: Wait = 4.0
    """Time limit of a test [s]; then it counts as failed."""
    total_seconds: Wait = 10.0
    """Time limit of all tests of an answer [s]; tests not started by then count as failed."""
    memory_mb: Annotated[int, Field(ge=32, le=1000000000)] = 512
    """Memory limit of all processes of a test together [MiB]."""


@dataclass(kw_only=True)
class Generation(Section):
    """Keys of birl's own inference engine."""

    recompute_kv: bool = True
    """When weights change during an answer, recompute its KV cache, so that each token's log-prob is exactly that of
    its weights version. False: keep the old KV cache (faster, approximate)."""
    max_batch: Count = 64
    """Maximum number of sequences decoded at once. vLLM and SGLang servers use more than the default, up to 1024, if a
    run sends each of them more requests at once."""
    kv_cache_gb: Size = 0.0
    """Memory of the KV cache [GiB]. 0: enough for max_batch sequences of the maximum length, at most half of the memory
    that is free after loading the model. When it is full, sequences wait."""
    weights: Literal["same", "int8"] = "same"
    """Weights for decoding: same (in model.dtype) | int8 (linear layers except the head in 8 bits, one scale per 32
    numbers, quantised anew for each weights version: half of the bytes on birl's CPU kernels; log-probs are those of
    the int8 weights, and training corrects the difference)."""
    draft_rows: Whole = 16
    """Speculative decoding with n-grams of the prompt and the other answers to it: while at most a quarter of this many
    sequences decode, a step is filled up to this many tokens with drafts. Does not change the samples. 0: off."""


@dataclass(kw_only=True)
class Engine(Generation):
    kind: Literal["embedded", "birl", "vllm", "sglang"] | EngineClass = "embedded"
    """Inference engine: embedded | birl | vllm | sglang. embedded samples in this process with the learner's own
    weights; the others are servers in their own processes. Or my_file.py:MyEngine or package.module:MyEngine, a class
    with generate and load."""
    count: Count = 1
    """Number of servers (for your own class: instances) that the run starts and stops."""
    attach: list[str] = field(default_factory=list)
    """Running servers to use: http://host:port or a name. A name is that of `birl serve name=experiment/trial`; its
    servers may join and leave during the run. The environment variable BIRL_TOKEN holds their token."""
    python: str = ""
    """Python interpreter for starting servers; vLLM and SGLang are usually installed in environments of their own.
    Empty: this interpreter."""
    threads: Threads = 0
    """CPU threads of each started server. 0: an equal share of the cores that the learner leaves, at least 1."""
    tensor_parallel: Count = 1
    """Tensor parallelism: GPUs that each server splits a layer over (vllm, sglang)."""
    pipeline_parallel: Count = 1
    """Pipeline parallelism: GPUs that each server distributes the layers over (vllm, sglang)."""
    memory_fraction: Nucleus = 0.9
    """Share of a GPU's memory for a server (vllm, sglang); with engine.sleep at most what the learner leaves."""
    arguments: list[str] = field(default_factory=list)
    """Extra arguments of the server's start command, or of your own class, passed unchanged."""
    sleep: bool = False
    """Servers release their weights and KV cache while the learner trains, because they share its device. Needs
    rollout.max_staleness=0."""
    start_timeout: Wait = 600.0
    """Timeout of a server's start, and of waiting for the names in engine.attach [s]."""
    request_timeout: Wait = 600.0
    """Timeout of an answer [s]; then the request is sent again, to another server if there is one."""
    restarts: Whole = 3
    """Restarts of each server that ended, before the run stops with an error."""


@dataclass(kw_only=True)
class Weights(Section):
    """Transfer of new weights to engines in other processes."""

    method: Literal["auto", "memory", "reload", "shared", "volume", "direct", "nccl", "ipc", "checkpoint"] = "auto"
    """Weight transfer to engines: memory (embedded engine: no transfer) | reload (engines read a folder) | shared (the
    same in shared memory, for servers on this machine) | volume (servers poll a folder) | direct (tensors over HTTP, in
    buckets) | nccl (broadcast to all servers; Gloo if the weights are on a CPU) | ipc (servers read the learner's
    memory, on the same GPU, or on the same machine for weights on a CPU) | checkpoint (restart the servers from a
    folder) | auto (memory or reload)."""
    sync_every: Count = 1
    """Send the weights every n training steps; at most rollout.max_staleness + 1."""
    folder: str = ""
    """Folder that reload, volume and checkpoint write to; for servers on other machines on a shared file system. Empty:
    `weights` in the run folder."""
    bucket_mb: Annotated[int, Field(ge=1, le=1000000)] = 256
    """Bucket size of direct, nccl and ipc [MB]."""
    timeout: Wait = 300.0
    """Timeout of a weight update [s]; then the run stops."""
    canary: Whole = 4
    """Number of prompts whose log-probs engines and learner both compute after each update, to verify the transfer. 0:
    no check."""
    max_gap: Positive = 0.1
    """Stop the run if the canary prompts' mean |engine log-prob - learner log-prob| exceeds this [nats per token]."""
