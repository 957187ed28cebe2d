"""Every noun that crosses a stage boundary, in the order in which a prompt meets them. A sample alone loads numpy.

    Task -> Env | Agent -> Completion -> Turn -> Trajectory -> Group -> Sample
    (then data/pack.py: Batch; learner/: StepStats)

Each stage has its own frozen type; nothing is filled in later. Tokens are the truth and text is a view of them: text
becomes tokens once, in `birl/text/`, and a mask comes from who produced a token, never from comparing with a pad id.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from birl.support import SAMPLE, alike, become_arrays

if TYPE_CHECKING:  # numpy is loaded by those that make samples: the process of rewards is light
    import numpy as np
    from numpy.typing import NDArray

    from birl.support import Bools, Floats, Ints, Support


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model makes; `arguments` is JSON text of an object. `id` is empty where the format has none.

    Example: ToolCall(name="weather", arguments='{"city": "Oslo"}')
    """

    name: str
    arguments: str
    id: str = ""


PICTURES = "pictures"
"""The folder of a run that has the files of pictures, each named by its digest."""
PLACE = "\ufffc"
"""Unicode's object replacement character: where a picture stands in a message's text."""


MAGIC = {
    b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif", b"BM": "image/bmp",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Picture:
    """An image file's bytes, as they were given; `digest` is their SHA-256, in hexadecimal digits.

    Example: Picture.of(Path("page.png").read_bytes())
    """

    digest: str
    data: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, data: bytes) -> "Picture":
        return cls(digest=sha256(data).hexdigest(), data=data)

    @property
    def media_type(self) -> str:
        """Of the file, by its first bytes; application/octet-stream where these are none of a picture."""
        return next((kind for magic, kind in MAGIC.items() if self.data.startswith(magic)), "application/octet-stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as the model's template sees it. `thinking` is what the model thought before, where its
    template sets that apart; `tool_calls` are an assistant's; a message of role `tool` answers `tool_call_id`, or the
    tool `name`. `pictures`: in order, one for each `PLACE` in `content`. Raises `ValueError` where these differ.

    Example: Message(role="user", content="What is 3 + 4?")
    """

    role: str
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def digests(self) -> str:
        """Of its pictures; empty without."""
        return " ".join(picture.digest for picture in self.pictures)

    def __post_init__(self) -> None:
        if self.pictures and self.content.count(PLACE) != len(self.pictures):
            raise ValueError(f"{len(self.pictures)} pictures for {self.content.count(PLACE)} places in the text")


#: messages, which the chat template renders, or plain text, which is encoded as it is
Conversation = tuple[Message, ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a dataset: what to ask, what is right, and everything else the row carries.

    `prompt` is messages (rendered with the chat template) or plain text (encoded as it is, for base models).
    `columns` go to reward functions as keyword arguments; `source` groups validation results. `messages`: the row's
    `prompt` is a list of messages, so reward functions get completions as messages, as TRL's do.

    Example: Task(id="train.jsonl:17", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7",
                  columns={"answer": "7"}, source="arithmetic")
    """

    id: str
    prompt: Conversation
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "data"
    messages: bool = False


LARGEST = 1e18  # of a reward: means and squares of such numbers fit into float32
ROUNDING = 1e-3  # a log-softmax may exceed 0 by its own rounding [nats]


class Stop(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model's end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # it was cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. The defaults sample from the model itself.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None takes one from the system. The
    first tokens are `forced`, if any: taken instead of drawn, with the log-probs they have. With max_tokens =
    len(forced) and ignore_eos that scores a given answer. `support`: the completion says which tokens each was
    drawn from; `top_k` must bound their number.

    Example: SamplingParams(max_tokens=64, temperature=1.0, stop=("</answer>",), seed=7)
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    forced: tuple[int, ...] = ()
    support: bool = False

    @property
    def plain(self) -> bool:
        """From the whole distribution, or greedy?"""
        return not self.temperature or not (self.top_k or self.top_p < 1 or self.min_p)

    @property
    def told(self) -> bool:
        """Does the completion have a support?"""
        return self.support and not self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled: ids, the log-prob of each under the distribution it was sampled from, and the version of
    the weights that sampled it. Token ids, never text. The end token is part of it when it was sampled, and absent when
    it was not. `routes`: which experts computed each token of the prompt and of the answer but its last, equally many
    bytes for each (`birl/models/routing.py`); empty where the engine does not tell. `support`: what each token was
    drawn from, where that was asked for and some were left out. `cached`: tokens of the prompt that the engine had
    computed before; it makes no difference to the answer.

    Columns may be given as any sequence of numbers; they become arrays: int32 or float32. Raises `ValueError` where
    they are not equally long, or have something that is no such number.

    Example: Completion(tokens=(45, 2), logprobs=(-0.1, -0.02), versions=(3, 3), stop=Stop.STOP)
    """

    tokens: "Ints"
    logprobs: "Floats"
    versions: "Ints"
    stop: Stop
    routes: bytes = b""
    support: "Support | None" = None
    cached: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        lengths = become_arrays(self, ("tokens", "logprobs", "versions"))
        if len(set(lengths)) > 1:
            raise ValueError("{} tokens, {} logprobs, {} versions".format(*lengths))
        if self.support is not None and len(self.support.counts) != lengths[0]:
            raise ValueError(f"{lengths[0]} tokens, {len(self.support.counts)} supports")

    __eq__ = alike

    @classmethod
    def of(
        cls, tokens: Any, logprobs: Any, versions: Any, stop: Stop, routes: bytes = b"", cached: int = 0,
        support: "Support | None" = None,
    ) -> "Completion":  # fmt: skip
        """From any sequences of numbers."""
        return cls(
            tokens=tokens, logprobs=logprobs, versions=versions, stop=stop, routes=routes, cached=cached,
            support=support,
        )  # fmt: skip

    @property
    def ids(self) -> tuple[int, ...]:
        """`tokens` as numbers of Python's: what is asked of an engine, and text is made of."""
        return tuple(self.tokens.tolist())

    def possible(self) -> "Completion":
        """Itself. Raises `ValueError` where it can be none: a log-prob that is NaN, infinite, or above 0 by more than
        rounding, an id or a version below 0, weights that become older within it."""
        for numbers, what in ((self.tokens, "token id"), (self.versions, "version")):
            if (numbers < 0).any():
                raise ValueError(f"{numbers.min()} is no {what}")
        if (self.versions[1:] < self.versions[:-1]).any():
            raise ValueError("the versions of its tokens go back")
        if self.support is not None and len(strange := self.support.without(self.tokens)):
            raise ValueError(f"token {strange[0]} is not in the support that it was drawn from")
        wrong = ~((self.logprobs > -LARGEST) & (self.logprobs <= ROUNDING))
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"the log-prob of token {place} of {len(wrong)} is {self.logprobs[place]}, "
                "and not a number of at most 0"
            )
        return self


PAST = "@past"
"""Behind a policy's name: one of its earlier versions, drawn for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the model within an episode: all ids that it saw, an int32 array, and what it answered. `reward` is
    what the environment gave everyone for this answer, `rewards` what it gave agents alone, by name. `agent` says who
    spoke, where an episode has several, each with its own reward; `policy` with which weights, where a run trains
    several policies: its name, and behind it `PAST` for an earlier version that is not trained.

    Example: Turn(prompt=(1, 9, 4), completion=Completion(...))
    """

    prompt: "Ints"
    completion: Completion
    reward: float = 0.0
    agent: str = ""
    policy: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def frozen(self) -> bool:
        return self.policy.endswith(PAST)

    def __post_init__(self) -> None:
        become_arrays(self, ("prompt",))

    __eq__ = alike


UNSCORED = "every reward function returned None"
"""The detail of an episode that no reward function judges. It is left out like one that failed, and fails nothing."""


class Outcome(StrEnum):
    """How an episode ended. Only `ok` and `truncated` carry a reward that means something."""

    OK = "ok"
    TRUNCATED = "truncated"  # a length limit cut the last answer
    ENV_ERROR = "env_error"  # the environment or the reward failed
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"

    @property
    def scored(self) -> bool:
        return self in (Outcome.OK, Outcome.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode. `reward` is trained on, `score` is reported (they may differ); both are NaN unless
    `outcome.scored`. `parts` holds each reward function's own figure, `detail` the first line of what went wrong.
    `rewards` by agent, where the episode has several: each is trained on its own, and `reward` is their mean.
    `pictures`: files that the environment has saved of what it showed, in their order. `extra` and `logged`: what
    reward functions say of the episode, and of the call that judged it, beside their values.

    Example: Trajectory(turns=(Turn(...),), reward=1.0, score=1.0, parts={"math": 1.0}, outcome=Outcome.OK)
    """

    turns: tuple[Turn, ...]
    reward: float
    score: float
    outcome: Outcome
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    pictures: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """n episodes of one task: the unit of scheduling and of baselines. `index` counts admissions since the run's start.
    `agent`: what is left of a group when only the turns of one of its agents are looked at.

    Example: Group(index=12, task=Task(...), trajectories=(Trajectory(...), Trajectory(...)), start_version=3)
    """

    index: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    start_version: int
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One flat list of ids for the learner, and parallel arrays [T]. `mask` is True where the model itself produced the
    token: only those are trained. `logprobs` and `versions` are the engine's; they are 0.0 and -1 where mask is False.
    `advantage` is one number for all trained tokens, or an array beside the others, as are `returns` and `values`, what
    a critic aims at and what it predicts (None without one), and `proximal`, the learner's own log-probs before the
    batch's first update (None where they are not asked for). `routes`: which experts computed each token, equally
    many bytes for each; empty where not asked for. `support`: the tokens that the n trained tokens were drawn from,
    where some were left out. `hinted`: ids of a prompt with a hint, which a teacher reads instead
    of all that is before the first trained token; None where there is none. `likely`: for the n trained tokens the k
    most likely tokens of a served teacher, int64 [n, k], and log-probs of these and of all others as one, float32
    [n, k + 1]. `group` and `episode` say where the sample comes from, `policy` whose weights sampled and learn it,
    where a run trains several, `teacher` which of several it is compared with.

    Columns may be given as any sequence of numbers; they become arrays: int32, bool or float32. Raises `ValueError`
    where they are not equally long, or the first token is trained.

    Example: Sample(tokens=(1, 9, 4, 45, 2), mask=(False, False, False, True, True), logprobs=(0., 0., 0., -.1, -.02),
                    versions=(-1, -1, -1, 3, 3), advantage=0.5, group=12, episode=0)
    """

    tokens: "Ints"
    mask: "Bools"
    logprobs: "Floats"
    versions: "Ints"
    advantage: "float | Floats"
    group: int
    episode: int
    returns: "Floats | None" = None
    values: "Floats | None" = None
    proximal: "Floats | None" = None
    routes: bytes = b""
    support: "Support | None" = None
    hinted: "Ints | None" = None
    likely: "tuple[NDArray[np.int64], Floats] | None" = None
    policy: str = ""
    teacher: str = ""

    def __post_init__(self) -> None:
        become_arrays(self, ("hinted",))
        lengths = set(become_arrays(self, SAMPLE))
        if len(lengths) != 1:
            raise ValueError(f"a Sample's columns must be equally long, got {sorted(lengths)}")
        if self.routes and len(self.routes) % len(self.tokens):
            raise ValueError(f"{len(self.routes)} bytes of routes for {len(self.tokens)} tokens")
        if self.support is not None and len(self.support.counts) != self.mask.sum():
            raise ValueError(f"{len(self.support.counts)} supports for {self.mask.sum()} trained tokens")
        if len(self.mask) and self.mask[0]:
            raise ValueError("the first token of a Sample has no context to be predicted from, so it cannot be trained")

    def by_version(self) -> Counter[int]:
        """Trained tokens by the version of the weights that sampled them."""
        import numpy as np

        versions, counts = np.unique(self.versions[self.versions >= 0], return_counts=True)
        return Counter(dict(zip(versions.tolist(), counts.tolist(), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """An environment's answer to one reply: new messages, and what the reply was worth. `prompt`, where it is given, is
    all that the model sees next, instead of the conversation so far and `messages`. `reward` is for everyone who takes
    part; `rewards` adds what policies earn alone, by name. `policy` replies next; empty: the one that has replied, and
    at first the environment's attribute of that name.

    Example: Feedback(messages=(Message(role="user", content="Too low."),), reward=0.0, done=False)
    """

    messages: tuple[Message, ...] = ()
    prompt: Conversation | None = None
    reward: float = 0.0
    score: float | None = None  # None: the same as reward; with `rewards`, the mean of what the policies have
    done: bool = True
    policy: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Env(Protocol):
    """One episode's world, in message space. Single use: it has no reset. Errors may be raised anywhere; they end the
    episode with the outcome `env_error`, never with a reward of 0. An attribute `tools`, if there is one, holds the
    JSON schemas of the tools that the model may call; its calls are then in `reply.tool_calls`. An attribute `policy`
    names who replies before `Feedback.policy` does (`policies` in the configuration). A coroutine `admit`, if
    there is one, is awaited before the episode's clock starts: for environments of which only some can run at once.
    Methods may be plain functions: those run in a thread, where they delay no other."""

    async def start(self) -> Conversation: ...
    async def step(self, reply: Message) -> Feedback: ...
    async def close(self) -> None: ...


class Model(Protocol):
    """What an agent talks to. `ask` continues the conversation that it knows the beginning of, token by token, or
    begins a new one; `agent` names the speaker, `policy` whose weights reply, where a run has several: the agent's name
    is the policy's, then, unless it has another. `base_url` is the same for a client of OpenAI's or Anthropic's API, in
    this process or another; `reward` is what such a client has sent to base_url/reward."""

    async def ask(
        self, conversation: Conversation, *, tools: Sequence[Mapping[str, Any]] = (), agent: str = "", policy: str = ""
    ) -> Message: ...
    @property
    def base_url(self) -> str: ...
    @property
    def reward(self) -> "float | Mapping[str, float] | None": ...


class Agent(Protocol):
    """One episode's program that talks to the model as it likes; the other way round from `Env`. `run` gives the
    reward, or one for each agent by name."""

    async def run(self, model: Model) -> float | Mapping[str, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """New weights on their way to an engine: which, what they must be, and where they are: in `folder` (Hugging Face
    format, complete, never changed afterwards) or in `tensors` (name -> torch.Tensor in the engine's type).

    `digests`: name -> `birl.models.digests.digest` of each tensor. An engine proves with its own that it holds them.
    `anew`: the first of a run. Versions count from its checkpoint, so what an engine has of a run before may have a
    higher number; any other update that is older than what an engine has is refused.

    Example: Update(version=12, digests={"model.norm.weight": "5f0e..."}, folder="runs/a/weights/v000012")
    """

    version: int
    digests: Mapping[str, str]
    folder: str = ""
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an engine says after a load. `digest` is `birl.models.digests.whole` of the tensors that it holds now, read
    from its own memory; empty where it cannot tell (vLLM and SGLang do not show their weights): then the canary alone
    proves them. Generation stood still for `seconds`, `bytes` were read.

    Example: Held(version=12, digest="9c1d...", seconds=0.08, bytes=269_000_000)
    """

    version: int
    digest: str = ""
    seconds: float = 0.0
    bytes: int = 0


class Engine(Protocol):
    """Anything that samples tokens. `version` is the version of the weights it would sample with now."""

    @property
    def version(self) -> int: ...
    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion: ...
    async def close(self) -> None: ...
