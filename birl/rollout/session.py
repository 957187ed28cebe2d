"""The conversation of one episode with the model. The caller passes all of it each time, as messages or text; tokens
that the model saw or sampled before are reused and never tokenized again from text.

    known     the conversation of each answer, with its token ids
    ask       longest known prefix of a conversation -> its ids, extended; without one all of it is rendered
    turns     prompts and answers in order, of which `assemble.py` makes Samples
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from birl.envs.calls import Threads, called
from birl.errors import Aborted, BirlError, EngineFailed, HistoryRewritten, TooLong
from birl.text.bounds import cannot_fit, takes_long
from birl.text.parts import checked
from birl.types import PAST, Completion, Conversation, Engine, Message, SamplingParams, Stop, Turn
from birl.waits import waiting

if TYPE_CHECKING:
    from birl.text.chat import Chat

Tools = Sequence[Mapping[str, Any]]
Key = tuple[Any, ...] | str
#: Long prompts, and pictures of agents, are rendered here. Few at once: they hold Python's lock in part.
PROMPTS = Threads(2, "birl-prompt")


class Gateway(Protocol):
    """Serves sessions over HTTP (`birl.server.gateway`)."""

    def enter(self, session: "Session") -> str: ...
    def leave(self, session: "Session") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A conversation that ends with an answer, and the ids of both. `key`: its normalised form, which is compared
    (`plain`); `talk`: the original messages, thinking included; `owner`: agent and tools."""

    key: Key
    talk: Conversation
    owner: tuple[str, str]
    turn: Turn

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.turn.prompt.tolist())

    @property
    def answer(self) -> tuple[int, ...]:
        return self.turn.completion.ids


@dataclass(slots=True, kw_only=True)
class Limits:
    """`timeout` of the whole episode [s], `turns`: calls of the model, `tokens` of a conversation. `cut_ends`: the
    episode ends with an answer that reaches its length limit."""

    timeout: float = 600.0
    turns: int = 8
    tokens: int = 1 << 30
    cut_ends: bool = True


class Session:
    """The `birl.types.Model` of one episode. `id`: the same for all episodes of a group, for engines; `name`: for
    reports of waits; `seed_of_turn`: number of a call -> its seed; `engine`: one, or one for each policy by name;
    `notes`: of those printed once, shared by the sessions of a run."""

    def __init__(
        self,
        engine: Engine | Mapping[str, Engine],
        chat: "Chat",
        params: SamplingParams,
        limits: Limits,
        seed_of_turn: Callable[[int], int],
        *,
        id: str = "",
        name: str = "an episode",
        gateway: Gateway | None = None,
        notes: set[str] | None = None,
    ) -> None:
        self.engine, self.chat, self.params, self.limits = engine, chat, params, limits
        self.seed_of_turn, self.id, self.name, self.gateway = seed_of_turn, id, name, gateway
        self.notes = set[str]() if notes is None else notes
        self.asked = 0
        self.known: list[Known] = []
        self.reward: float | dict[str, float] | None = None  # set over HTTP
        self.failure: Exception | None = None  # of the engine or a limit, also if the agent catches it
        self._turns: dict[int, Turn] = {}
        self._open = 0  # calls without an answer yet
        self._closed = False
        self._url = ""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(turn for _, turn in sorted(self._turns.items()))

    @property
    def base_url(self) -> str:
        """Address of this episode's OpenAI and Anthropic API; its answers are turns of the episode."""
        if self.gateway is None:
            raise RuntimeError("this session has no address: the run was started without a gateway")
        self._url = self._url or self.gateway.enter(self)
        return self._url

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies; empty if there is one without a name."""
        return tuple(self.engine) if isinstance(self.engine, Mapping) else ()

    async def ask(self, conversation: Conversation, *, tools: Tools = (), agent: str = "", policy: str = "") -> Message:
        """The model's reply. Raises `EngineFailed`, `Aborted` and `TooLong`, which end the episode."""
        return (await self.answer(conversation, self.params, tools=tools, agent=agent, policy=policy))[0]

    async def answer(
        self,
        conversation: Conversation,
        params: SamplingParams,
        *,
        tools: Tools = (),
        agent: str = "",
        policy: str = "",
        keep_end: bool = False,
    ) -> tuple[Message, Turn]:
        """As `ask`, with sampling parameters; also returns the recorded turn. `keep_end`: a text that continues an
        answer keeps its end token, so that both are one sequence. The reply ends before a stop string or token of
        the request (not of the run), as in other APIs; the recorded tokens include it."""
        try:
            policy, engine = chosen(self.engine, policy, agent)
            names = agent or policy, policy
            return await self._answer(conversation, params, tools, names, engine, keep_end)
        except (EngineFailed, Aborted) as error:
            if not isinstance(self.failure, EngineFailed | Aborted):
                self.failure = error
            raise
        except TooLong as error:
            self.failure = self.failure or error
            raise

    async def _answer(
        self,
        conversation: Conversation,
        params: SamplingParams,
        tools: Tools,
        names: tuple[str, str],
        engine: Engine,
        keep_end: bool,
    ) -> tuple[Message, Turn]:
        agent, policy = names
        if self._closed:  # code that still runs after the episode's timeout
            raise Aborted
        number, self.asked = self.asked, self.asked + 1
        if len(self._turns) + self._open >= self.limits.turns:
            raise TooLong(f"the episode sent more than env.max_turns={self.limits.turns} requests")
        conversation = checked(conversation)
        if cannot_fit(conversation, self.limits.tokens):
            raise TooLong(
                f"a prompt has more characters than {self.limits.tokens} tokens hold, and leaves no room for an answer "
                "(model.max_length, at most the model's context)"
            )
        owner = owner_of(tools, agent)
        self._open += 1
        try:
            asked = tuple(self.known), self.chat, conversation, tools, owner, keep_end
            work = partial(prompted, *asked, tell=not keep_end and "history" not in self.notes)
            prompt, talk, what = await called(work, threads=PROMPTS) if takes_long(conversation, self._url) else work()
            if (room := self.limits.tokens - len(prompt)) < 1:
                raise TooLong(
                    f"a prompt of {len(prompt)} tokens leaves no room for an answer within {self.limits.tokens} "
                    "(model.max_length, at most the model's context)"
                )
            params = replace(params, seed=self.seed_of_turn(number), max_tokens=min(params.max_tokens, room))
            if what and "history" not in self.notes:
                self.notes.add("history")
                print(
                    f"An agent changed its history: in turn {number} {what} from before. So the turn begins a new "
                    f"sample, and the {len(prompt)} tokens of its prompt are computed again. Told once.", flush=True,
                )  # fmt: skip
            with waiting(self.name, f"turn {number}", "engine", self.limits.timeout):
                completion = await self._generate(engine, prompt, params)
        finally:
            self._open -= 1
        if self._closed:  # a call that the agent did not wait for: its reward is given already
            raise Aborted
        turn = Turn(prompt=np.array(prompt, np.int32), completion=completion, agent=agent, policy=policy)
        self._turns[number] = turn
        if completion.stop is Stop.ABORT:
            raise Aborted
        text = self.chat.reply_text(completion.ids)
        shown = visible(self.chat, text, completion, params, self.params)
        whole = reply = reply_to(conversation, text, self.chat.parse(completion.ids, tools, prompt))
        if shown != text:
            reply = reply_to(conversation, shown, self.chat.parts(shown, tools, self.chat.thinks(prompt)).message())
        kept = whole if isinstance(conversation, str) else reply  # a text that goes on has the stop string itself
        key, talk = (following(t, kept) for t in (conversation, talk))
        self.known.append(Known(key=plain(key), talk=talk, owner=owner, turn=turn))
        return reply, turn

    def forget(self, turn: Turn) -> None:
        """Remove a turn whose answer the caller never received."""
        self._turns = {number: t for number, t in self._turns.items() if t is not turn}
        self.known = [k for k in self.known if k.turn is not turn]

    def rewarded(self, reward: float, agent: str = "") -> None:
        """Set the reward of the episode, or of one agent in it. The last one counts."""
        others = self.reward if isinstance(self.reward, dict) else {}
        self.reward = {**others, agent: reward} if agent else reward

    def credit(self, reward: float, rewards: Mapping[str, float]) -> None:
        """Set the environment's reward of the newest turn: the common one, and those of single agents."""
        number = max(self._turns)
        self._turns[number] = replace(self._turns[number], reward=reward, rewards=rewards)

    def close(self) -> None:
        self._closed = True
        if self._url and self.gateway is not None:
            self.gateway.leave(self)
            self._url = ""

    async def _generate(self, engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        try:
            result = (await engine.generate(prompt, params, self.id)).possible()
            if params.told and len(result.tokens) and result.support is None:
                raise BirlError("The engine did not report the tokens that each was sampled from; training needs them.")
            return result
        except Exception as error:
            raise EngineFailed from error


def chosen(engines: Engine | Mapping[str, Engine], policy: str, agent: str) -> tuple[str, Engine]:
    """Name and engine of the policy that replies: the named one, else the one with the agent's name, else the only
    trained one. Raises `BirlError` if there is no such policy."""
    if not isinstance(engines, Mapping):
        return "", engines
    trained = [name for name in engines if not name.endswith(PAST)]
    name = policy or (agent if agent in engines else trained[0] if len(trained) == 1 else "")
    if name not in engines:
        error = f"there is no policy {name!r}" if name else "the request names no policy"
        raise BirlError(
            f"{error}; there are {', '.join(engines)} (policies=...). An environment names it as `Feedback.policy` or "
            "as its attribute `policy`, an agent as `policy` of `ask`, a client as the request's `model`."
        )
    return name, engines[name]


def prompted(known: Sequence[Known], *asked: Any, tell: bool) -> tuple[tuple[int, ...], Conversation, str]:
    """`continued`, and if `tell` what has `changed`."""
    _, conversation, _, owner, _ = asked
    return *continued(known, *asked), changed(known, conversation, owner) if tell else ""


def continued(
    known: Sequence[Known],
    chat: "Chat",
    conversation: Conversation,
    tools: Tools,
    owner: tuple[str, str],
    keep_end: bool = False,
) -> tuple[tuple[int, ...], Conversation]:
    """Ids of the conversation: those of its longest known prefix, unchanged, and of the rest; and the conversation that
    the ids contain, with the thinking that clients drop."""
    best = longest(known, conversation, plain(conversation), owner)
    if best is None:
        return chat.render(conversation, tools), conversation
    if isinstance(conversation, str) or isinstance(best.talk, str):
        new = conversation[len(best.key) :]
        return chat.append(best.prompt, best.answer, new, keep_end), conversation  # pyright: ignore
    new = conversation[len(best.key) :]
    try:
        return chat.extend(best.prompt, best.answer, new, tools, best.talk[:-1]), (*best.talk, *new)
    except HistoryRewritten:
        return chat.render(conversation, tools), conversation


def longest(known: Sequence[Known], conversation: Conversation, own: Key, owner: tuple[str, str]) -> Known | None:
    """The longest known conversation that the given one continues, of equally long ones the newest. `own`: its key."""
    for k in sorted(known, key=lambda k: len(k.key))[::-1]:
        same = k.owner == owner and type(k.key) is type(own) and own[: len(k.key)] == k.key
        if same and thought(conversation, k.talk):
            return k
    return None


def changed(known: Sequence[Known], conversation: Conversation, owner: tuple[str, str]) -> str:
    """What differs from the known conversation whose answer this one repeats after other messages, with other tools or
    thinking; or of which it has half of the messages. Empty if it is new, or continues a known one."""
    own = plain(conversation)
    best = longest(known, conversation, own, owner)
    start = len(best.key) if best else 0
    if isinstance(own, str) or not any(role == "assistant" for role, *_ in own[start:]):
        return ""
    for one in reversed(known):
        if one.owner[0] != owner[0] or not isinstance(one.key, tuple) or len(one.key) <= start:
            continue
        same = [a == b for a, b in zip(one.key, own, strict=False)]
        if all(same) and len(own) >= len(same) == len(one.key):
            return "its tools differ" if one.owner != owner else "the thinking of its messages differs"
        place = same.index(False) if False in same else len(own)
        repeated = one.key[-2:] in pairwise(own[place:]) or (place > 1 and one.key[-1] in own[place:])
        if one.owner == owner and (repeated or (len(same) == len(one.key) and 2 * sum(same) >= len(same))):
            return f"message {place} ({own[place][0]}) differs"
    return ""


def thought(conversation: Conversation, talk: Conversation) -> bool:
    """Whether thinking in the conversation equals that in `talk`; leaving it out is no change."""
    if isinstance(conversation, str) or isinstance(talk, str):
        return True
    pairs = ((m.thinking.strip(), known.thinking.strip()) for m, known in zip(conversation, talk, strict=False))
    return all(thinking in ("", known) for thinking, known in pairs)


def owner_of(tools: Tools, agent: str = "") -> tuple[str, str]:
    """The owner of a conversation: an agent with these tools."""
    return agent, json.dumps(list(tools), sort_keys=True, default=str) if tools else ""


def following(conversation: Conversation, reply: Message, messages: tuple[Message, ...] = ()) -> Conversation:
    """The conversation followed by a reply and further messages."""
    if isinstance(conversation, str):
        return conversation + reply.content + "".join(m.content for m in messages)
    return (*conversation, reply, *messages)


def reply_to(conversation: Conversation, text: str, parsed: Message) -> Message:
    """The parsed answer. Of a text conversation the content is the whole answer, as later texts continue it."""
    if isinstance(conversation, str):
        return Message(role="assistant", content=text, tool_calls=parsed.tool_calls)
    return parsed


def visible(chat: "Chat", text: str, completion: Completion, params: SamplingParams, own: SamplingParams) -> str:
    """The answer's `text` up to the first stop string or token of the request (`params`; `own`: the run's)."""
    ended = completion.stop is Stop.STOP and {*completion.ids[-1:]} & {*params.stop_ids} - {*own.stop_ids}
    shown = chat.reply_text(completion.ids[:-1]) if ended else text
    return min([shown, *(text.partition(s)[0] for s in params.stop if s not in own.stop)], key=len)


def plain(conversation: Conversation) -> Key:
    """The normalised form in which conversations are compared: without thinking, ids of calls, empty fields and outer
    blanks, all of which clients drop."""
    if isinstance(conversation, str):
        return conversation
    return tuple(
        (m.role, m.content.strip(), m.digests, m.name, tuple((c.name, arguments(c.arguments)) for c in m.tool_calls))
        for m in conversation
    )


def arguments(text: str) -> str:
    """JSON in normal form; other text as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text
