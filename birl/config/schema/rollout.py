"""What episodes are, what samples them and what judges them."""

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
    """Prompts (groups) per step."""
    group_size: Count = 8
    """Episodes per prompt."""
    max_tokens: Count = 256
    """Longest answer [tokens per turn]."""
    temperature: Amount = 1.0
    """Sampling temperature; the learner's log-probs use it too."""
    top_p: Nucleus = 1.0
    """Nucleus. The learner's log-probs are over the same tokens (docs/algorithms.md#top-p-top-k-and-min-p)."""
    top_k: Whole = 0
    """Sample among the k most likely tokens, 0: off; with top_p or min_p among at most 1,024."""
    min_p: Share = 0.0
    """Drop tokens below min_p times the most likely."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer; they stay part of it."""
    failed: Literal["drop", "drop_group"] = "drop"
    """Episodes that end as env_error, engine_error, timeout or aborted: drop (the rest of the group goes on without
    them) | drop_group."""
    truncated: Literal["keep", "drop"] = "keep"
    """Answers cut by the length limit: keep (their reward enters the baseline) | drop (treated like failed ones)."""
    max_failure_rate: Share = 0.5
    """Stop the run when more than this share of a step's episodes failed."""
    max_staleness: Whole = 0
    """Oldest weights that may sample, in training steps. 0: synchronous, generation and training alternate. Above 0
    they overlap; what counts is the version under which a group of answers was begun."""
    order_window: Whole = 0
    """How many groups may be overtaken by finished later ones, so that a slow one does not hold up a step. Costs as
    many groups that are rolled out ahead. At most (max_staleness - weights.sync_every + 1) x prompts."""
    oversample: Whole = 0
    """More episodes per prompt than rollout.group_size; the first to finish are taken and the others cut short. Faster
    with stragglers, and it prefers short answers."""


@dataclass(kw_only=True)
class Env(Section):
    """`options` are the environment's own keys, as they were written."""

    kind: str = "single_turn"
    """Environment: a task's name or my_file.py:NAME. single_turn (one prompt and one answer) | a task of docs/tasks.md
    | my_file.py:NAME or package.module:NAME, which is a class with start, step and close, a class with run, a function
    step(state, action, extra_info), or any function that is an agent (docs/environments.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own keys, which `birl rl env=NAME --help` lists. Written without this name: env.low=1."""
    max_turns: Count = 8
    """Calls of the model per episode; then it is cut, and its outcome is `truncated`."""
    cut_turn: Literal["end", "continue"] = "end"
    """What follows an answer that is cut at its longest (rollout.max_tokens): end (of the episode, whose outcome is
    `truncated`) | continue (as the environment says, as if the answer had ended by itself)."""
    timeout: Wait = 600.0
    """Longest an episode may take, rewards not counted [s]; after that its outcome is `timeout`."""
    sampling: Literal["run", "agent"] = "run"
    """How answers to an agent's OpenAI or Anthropic client are drawn: run (as rollout or validation says, whatever the
    client asks for) | agent (with the client's own temperature, top_p, top_k and min_p; `birl eval` only, as training
    needs the log-probs of what the run itself would draw)."""
    mcp: list[str] = field(default_factory=list)
    """MCP servers whose tools the model may call beside the environment's own: commands, which are started for each
    episode, and addresses, as in env.mcp=['python server.py','http://127.0.0.1:8000/mcp']."""
    mcp_timeout: Wait = 30.0
    """Longest an MCP server may take to begin, and to answer a call [s]; after that the episode is an env_error."""
    mcp_longest: Count = 8000
    """Characters of a tool's result, and of its description, that the model sees."""
    mcp_sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """How commands of env.mcp are confined: auto (the best that works here: no network, and of the files only Python,
    its packages, and those that the command names) | bubblewrap | landlock | none (with your network and variables)."""


@dataclass(kw_only=True)
class Validation(Section):
    every: Whole = 10
    """Validate every n steps; 0: never."""
    at_start: bool = True
    """Validate before the first step as well."""
    samples: Count = 1
    """Answers per prompt; pass@k is estimated from them."""
    k: list[Count] = field(default_factory=lambda: [1])
    """The k of pass@k; each at most validation.samples."""
    threshold: Amount = 0.0
    """A score of at least this is right, which pass@k counts. 0: there is pass@k only where all scores are 0 or 1."""
    temperature: Amount = 0.0
    """0: greedy."""
    top_p: Nucleus = 1.0
    """Nucleus."""
    top_k: Whole = 0
    """Sample among the k most likely tokens, 0: off."""
    max_tokens: Whole = 0
    """Longest answer [tokens]. 0: rollout.max_tokens."""


@dataclass(kw_only=True)
class Reward(Section):
    functions: list[Literal["math", "code", "format", "length", "model", "judge"] | Function] = field(
        default_factory=list
    )
    """Reward functions, such as math or my_file.py:name. math | code (unit tests) | format | length | model (a reward
    model, reward.model) | judge (a language model, reward.judge), or my_file.py:my_function, or
    package.module:function. They judge the last answer, and add to what the environment gave. Empty: math for
    env.kind=single_turn, else the environment alone."""
    weights: list[Real] = field(default_factory=list)
    """One weight for each function; the reward is the weighted sum. Empty: 1 / number of functions each (their
    mean)."""
    timeout: Deadline = 0.0
    """Longest one call may take [s]; after that the worker is killed and the episode's outcome is `timeout`. 0: 10,
    with `judge` 120, and with `code` what the tests of a group may take."""
    workers: Workers = 1
    """Processes that compute rewards."""
    format_pattern: str = r"^<think>.*?</think>\s*<answer>.*?</answer>\s*$"
    """Regular expression that `format` looks for in the whole answer."""
    model: str = ""
    """Folder of a reward model, a run of `birl rm`, or the address of a server that has one:
    http://host:port/pooling."""
    judge: list[str] = field(default_factory=list)
    """Addresses of the language models that judge; several are a panel. As in OpenAI's API:
    http://host:port/v1#MODEL. The token is taken from the environment variable BIRL_REWARD_TOKEN: one, or one for each
    address, with commas between them."""
    judge_mode: Literal["score", "group", "pairs"] = "score"
    """What a judge sees at once: score (one answer) | group (all answers to a prompt, scored relative to each other) |
    pairs (two of them: which is better? The score is the share of pairs that an answer wins)."""
    judge_rounds: Count = 1
    """How often a group or a pair is shown, each time in another order, which depends on `seed`. With 2, each of two
    answers is first once."""
    judge_rubric: list[str] = field(default_factory=list)
    """Criteria, such as "2: It names its source."; the number is the weight, 1 without. Below 0: what an answer should
    not have."""
    judge_rubric_column: str = ""
    """Column with the row's own criteria: such texts, or objects with a text and a weight. Rows without one have those
    of reward.judge_rubric."""
    judge_panel: Literal["mean", "median", "majority"] = "mean"
    """What several judges' scores become: mean | median | majority (1 or 0, as most judges give at least 0.5, or not;
    0.5 where as many do as do not)."""
    judge_rate: Amount = 0.0
    """Requests a minute that all workers together send to each judge. 0: any number."""
    judge_prompt: str = ""
    """Text file with what a judge is asked; {prompt}, {completion}, {gold}, {rubric} and {form} (of its last line) are
    filled in. Empty: birl's own."""
    judge_tokens: Count = 512
    """Longest reply of a judge [tokens]."""
    judge_cache: bool = True
    """Keep judges' replies in the cache folder, and ask the same question only once."""
    concurrency: Count = 8
    """Requests to the judge, or to the server of a reward model, that one worker has open at once."""
    length_target: Count = 256
    """`length` gives 1 up to this many characters and falls to 0 at twice as many."""
    code_partial: bool = True
    """`code` gives the share of the tests that passed. False: 1 where all passed, else 0."""


@dataclass(kw_only=True)
class Sandbox(Section):
    """Where programs of the model run: what the reward function `code` reads."""

    kind: Literal["auto", "zygote", "bubblewrap", "landlock", "process", "modal"] = "auto"
    """zygote (bubblewrap around a Python that forks for every run) | bubblewrap (anew for every run) | landlock (no
    namespaces) | modal (in Modal's cloud) | process (no boundary: only for programs that you trust) | auto (the first
    of zygote, bubblewrap and landlock that a trial run shows to work)."""
    workers: Threads = 0
    """Programs that run at once, in each reward worker. 0: the cores, shared among reward.workers."""
    seconds: Wait = 4.0
    """Longest a test may take [s]; then it has not passed."""
    total_seconds: Wait = 10.0
    """Longest all tests of an answer may take [s]; those that are not begun by then have not passed."""
    memory_mb: Annotated[int, Field(ge=32, le=1000000000)] = 512
    """Memory of all processes of a test together [MiB]."""


@dataclass(kw_only=True)
class Generation(Section):
    """What birl's own engine reads."""

    recompute_kv: bool = True
    """When the weights change in the middle of an answer, compute its keys and values anew, so that the log-prob of
    each token is exactly that of the version it names. False: keep the old ones (faster, approximate)."""
    max_batch: Count = 64
    """Most sequences decoded at once. Servers of vLLM and SGLang take more than the default where a run asks more of
    each at once, up to 1024."""
    kv_cache_gb: Size = 0.0
    """Memory for keys and values [GiB]. 0: what max_batch of the longest possible sequences need, at most half of the
    memory that is free once the model is loaded. When it is full, sequences wait for one another."""
    weights: Literal["same", "int8"] = "same"
    """What decoding reads: same (the weights in model.dtype) | int8 (the linear layers but the head in 8 bits, 32
    numbers with one scale, rounded anew for each version: half of their bytes on birl's CPU kernels; log-probs are
    those of what sampled, and training corrects the difference)."""
    draft_rows: Whole = 16
    """While no more than a quarter as many sequences are decoded, fill a step up to so many tokens with guesses from
    the prompt and its other answers. What is sampled stays the same. 0: off."""


@dataclass(kw_only=True)
class Engine(Generation):
    kind: Literal["embedded", "birl", "vllm", "sglang"] | EngineClass = "embedded"
    """Inference engine: embedded | birl | vllm | sglang. embedded samples in this process, from the learner's own
    weights; the others are servers in their own processes. Or my_file.py:MyEngine or package.module:MyEngine, a class
    with generate and load."""
    count: Count = 1
    """Servers that are started with the run, and end with it; of a class of your own, objects."""
    attach: list[str] = field(default_factory=list)
    """Running servers to use: http://host:port or a name. A name is what `birl serve name=experiment/trial` was given:
    servers that take it later join, and those that give it up leave. Their token is taken from the environment variable
    BIRL_TOKEN."""
    python: str = ""
    """Python interpreter that servers are started with; vLLM and SGLang are usually installed in environments of their
    own. Empty: this one."""
    threads: Threads = 0
    """CPU threads of each server that is started. 0: its share of the cores that the learner leaves, at least 1."""
    tensor_parallel: Count = 1
    """GPUs that each server splits a layer over (vllm, sglang)."""
    pipeline_parallel: Count = 1
    """GPUs that each server splits the layers over (vllm, sglang)."""
    memory_fraction: Nucleus = 0.9
    """Share of a GPU's memory that a server may take (vllm, sglang); with engine.sleep no more than the learner
    leaves."""
    arguments: list[str] = field(default_factory=list)
    """Further words for the command that starts a server, or for a class of your own, as they are."""
    sleep: bool = False
    """Servers give back their weights and caches while the learner trains, because they share its device. For
    rollout.max_staleness=0."""
    start_timeout: Wait = 600.0
    """Longest a server may take to start, or to take the name that engine.attach waits for [s]."""
    request_timeout: Wait = 600.0
    """Longest one answer may take [s]; then it is asked for again, from another server where there is one."""
    restarts: Whole = 3
    """How often each server that ended is started again before the run gives up."""


@dataclass(kw_only=True)
class Weights(Section):
    """How new weights reach engines in other processes."""

    method: Literal["auto", "memory", "reload", "shared", "volume", "direct", "nccl", "ipc", "checkpoint"] = "auto"
    """memory (the embedded engine: nothing is sent) | reload (a folder, read in place) | shared (the same in shared
    memory, for servers on this machine) | volume (a folder that servers look into by themselves) | direct (tensors
    over HTTP, in buckets) | nccl (a broadcast to all servers at once; Gloo where the weights are on a CPU) | ipc (read
    from the learner's memory, by servers on its GPU, or on its machine where the weights are on a CPU) | checkpoint (a
    folder, and servers are started anew from it) | auto (memory or reload)."""
    sync_every: Count = 1
    """Send them every n training steps; at most rollout.max_staleness + 1."""
    folder: str = ""
    """Where reload, volume and checkpoint write, for servers on other machines a file system that all see. Empty:
    `weights` in the run folder."""
    bucket_mb: Annotated[int, Field(ge=1, le=1000000)] = 256
    """Size of the pieces of method=direct, nccl and ipc [MB]."""
    timeout: Wait = 300.0
    """Longest an update may take [s]; then the run stops."""
    canary: Whole = 4
    """Prompts whose log-probs engines and learner both compute after every update. 0: none."""
    max_gap: Positive = 0.1
    """Stop when their mean |engine log-prob - learner log-prob| exceeds this [nats a token]."""
