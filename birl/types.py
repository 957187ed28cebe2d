"""The types that are passed between stages, in the order in which a prompt meets them. Those with a value for each
token are in `samples.py`; only these load numpy.

    Task -> Env | Agent -> Completion -> Turn -> Trajectory -> Group -> Sample
    (then data/pack.py: Batch; learner/: StepStats)

Each stage has its own frozen type; no field is filled in later. Token ids are authoritative and text is derived from
them: text is tokenized once, in `birl/text/`, and a mask depends on who produced a token, never on a comparison with a
pad id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from birl.samples import Completion as Completion
from birl.samples import Sample as Sample
from birl.samples import Stop as Stop
from birl.samples import alike, become_arrays

if TYPE_CHECKING:  # numpy is loaded only where samples are made; the reward worker stays light
    from birl.samples import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model. `arguments`: JSON text of an object; `id`: empty if the model's format has none.

    Example: ToolCall(name="weather", arguments='{"city": "Oslo"}')
    """

    name: str
    arguments: str
    id: str = ""


PICTURES = "pictures"
"""Folder of a run with the image files, each named by its digest."""
PLACE = "\ufffc"
"""Unicode's object replacement character: marks the position of a picture in a message's text."""


MAGIC = {
    b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif", b"BM": "image/bmp",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Picture:
    """The bytes of an image file, unchanged. `digest`: their SHA-256 in hexadecimal.

    Example: Picture.of(Path("page.png").read_bytes())
    """

    digest: str
    data: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, data: bytes) -> "Picture":
        return cls(digest=sha256(data).hexdigest(), data=data)

    @property
    def media_type(self) -> str:
        """Media type of the file by its first bytes; application/octet-stream if they are of no known image format."""
        return next((kind for magic, kind in MAGIC.items() if self.data.startswith(magic)), "application/octet-stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as the model's template sees it. `thinking`: reasoning before the answer, if the template keeps
    it apart; `tool_calls`: of an assistant message; a message of role `tool` answers the call `tool_call_id`, or the
    tool `name`. `pictures`: in order, one for each `PLACE` in `content`. Raises `ValueError` if their numbers differ.

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
        """Digests of its pictures, separated by spaces; empty if there are none."""
        return " ".join(picture.digest for picture in self.pictures)

    def __post_init__(self) -> None:
        if self.pictures and self.content.count(PLACE) != len(self.pictures):
            raise ValueError(f"{len(self.pictures)} pictures for {self.content.count(PLACE)} places in the text")


#: messages, rendered with the chat template, or plain text, tokenized as it is
Conversation = tuple[Message, ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a dataset: prompt, reference answer, and all other columns.

    `prompt` is messages (rendered with the chat template) or plain text (tokenized as it is, for base models).
    `columns` are passed to reward functions as keyword arguments; `source` groups validation results. `messages`: the
    row's `prompt` is a list of messages, so reward functions get completions as messages, as in TRL.

    Example: Task(id="train.jsonl:17", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7",
                  columns={"answer": "7"}, source="arithmetic")
    """

    id: str
    prompt: Conversation
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "data"
    messages: bool = False

    @property
    def place(self) -> str:
        """The row for messages, which count from 1; ids count from 0."""
        name, _, number = self.id.rpartition(":")
        return f"{name}, row {int(number) + 1}" if number.isdecimal() else self.id


LARGEST = 1e18  # largest reward: means and squares of such numbers fit into float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one completion. The defaults sample from the model's distribution.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None: a random one. The tokens in
    `forced`, if any, come first: they are not sampled, but have log-probs. With max_tokens = len(forced) and ignore_eos
    this scores a given answer. `support`: return the set of tokens that each token was sampled from; `top_k` must bound
    its size.

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
        """Whether it samples from the whole distribution, or greedily."""
        return not self.temperature or not (self.top_k or self.top_p < 1 or self.min_p)

    @property
    def told(self) -> bool:
        """Whether the completion has a `support`."""
        return self.support and not self.plain


PAST = "@past"
"""Suffix of a policy's name: one of its earlier versions, drawn for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the model within an episode: the prompt's ids (int32) and the completion. `reward`: given by the
    environment for this answer, to all agents; `rewards`: to single agents, by name. `agent`: the agent that made the
    call, if an episode has several, each with its own reward; `policy`: name of the policy that answered, if a run
    trains several, with the suffix `PAST` for an earlier version, which is not trained.

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
"""`Trajectory.detail` of an episode without any reward. Left out like a failed one, but not counted as a failure."""


class Outcome(StrEnum):
    """How an episode ended. Only `ok` and `truncated` carry a meaningful reward."""

    OK = "ok"
    TRUNCATED = "truncated"  # by a limit of tokens, turns, or of the environment's own
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
    `outcome.scored`. `parts`: value of each reward function; `detail`: first line of the error, if any. `rewards`: by
    agent, if the episode has several: each is trained on its own, and `reward` is their mean. `pictures`: image files
    that the environment has saved, in order. `extra` and `logged`: additional columns and metrics from reward
    functions, of the episode and of the call that scored it.

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
    `agent`: set if the group has only the turns of this agent (`by_agent`).

    Example: Group(index=12, task=Task(...), trajectories=(Trajectory(...), Trajectory(...)), start_version=3)
    """

    index: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    start_version: int
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """An environment's response to one reply: new messages, and the reward of the reply. `prompt`: if given, replaces
    the conversation so far and `messages` as the model's next prompt. `reward` goes to all agents; `rewards` adds those
    of single policies, by name. `policy`: the one that replies next; empty: the one that replied last, at first the
    environment's attribute `policy`. `truncated`: it ended by a limit that is no part of the task, as env.max_turns is.

    Example: Feedback(messages=(Message(role="user", content="Too low."),), reward=0.0, done=False)
    """

    messages: tuple[Message, ...] = ()
    prompt: Conversation | None = None
    reward: float = 0.0
    score: float | None = None  # None: equal to reward; with `rewards`, the mean over policies
    done: bool = True
    truncated: bool = False
    policy: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Env(Protocol):
    """The environment of one episode, on the level of messages. Single use: it has no reset. An exception anywhere ends
    the episode with the outcome `env_error`, never with a reward of 0. Optional attributes: `tools`, JSON schemas of
    the tools that the model may call (its calls are in `reply.tool_calls`); `policy`, the one that replies first
    (`policies` in the configuration), later `Feedback.policy` decides. An optional coroutine `admit` is awaited before
    the episode's timeout starts: for environments of which only some can run at once. Methods may be plain functions:
    these run in a thread and do not block other episodes."""

    async def start(self) -> Conversation: ...
    async def step(self, reply: Message) -> Feedback: ...
    async def close(self) -> None: ...


class Model(Protocol):
    """The model that an agent calls. `ask` continues the known conversation that is a prefix of the given one, token by
    token, or starts a new one; `agent`: name of the caller; `policy`: the one that replies, if a run has several; by
    default the policy with the agent's name. `base_url`: the same model for a client of OpenAI's or Anthropic's API, in
    this process or another; `reward`: sent by such a client to base_url/reward."""

    async def ask(
        self, conversation: Conversation, *, tools: Sequence[Mapping[str, Any]] = (), agent: str = "", policy: str = ""
    ) -> Message: ...
    @property
    def base_url(self) -> str: ...
    @property
    def reward(self) -> "float | Mapping[str, float] | None": ...


class Agent(Protocol):
    """A program that runs one episode and calls the model itself, unlike an `Env`, which is called. `run` returns the
    reward, or one for each agent by name."""

    async def run(self, model: Model) -> float | Mapping[str, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A weight update for an engine: version, digests, and the weights, in `folder` (Hugging Face format, complete,
    never changed afterwards) or in `tensors` (name -> torch.Tensor in the engine's dtype).

    `digests`: name -> `birl.models.digests.digest` of each tensor, compared with the engine's own after loading.
    `anew`: first update of a run. Versions count from the run's checkpoint, so an engine may have a higher version of
    an earlier run; any other update that is older than the engine's version is refused.

    Example: Update(version=12, digests={"model.norm.weight": "5f0e..."}, folder="runs/a/weights/v000012")
    """

    version: int
    digests: Mapping[str, str]
    folder: str = ""
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An engine's response to a weight update. `digest`: `birl.models.digests.whole` of the tensors it holds now, read
    from its own memory; empty if it cannot tell (vLLM and SGLang do not expose their weights): then only the canary
    verifies them. `seconds`: how long generation was paused; `bytes`: bytes read.

    Example: Held(version=12, digest="9c1d...", seconds=0.08, bytes=269_000_000)
    """

    version: int
    digest: str = ""
    seconds: float = 0.0
    bytes: int = 0


class Engine(Protocol):
    """Anything that samples tokens. `version`: version of the weights that it would sample with now."""

    @property
    def version(self) -> int: ...
    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion: ...
    async def close(self) -> None: ...
