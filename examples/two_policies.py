"""Two games for several policies, in the toy language (one token a character): a model of two layers learns them.

    python recipes/toy/toy.py make runs/toy
    birl sft model.path=runs/toy/model data.train=runs/toy/sft.jsonl data.answer_column=answer optimizer.lr=2e-3 \\
        optimizer.schedule=linear epochs=12 batch_size=64 data.apply_chat_template=false run=runs/toy/base
    birl rl env=examples/two_policies.py:Cipher policies=[sender,receiver] rollout.prompts=10 $KEYS
    birl rl env=examples/two_policies.py:Sticks policies=[player] league.every=5 rollout.prompts=12 $KEYS

KEYS is `model.path=runs/toy/base model.dtype=float32 lora.rank=8 optimizer.lr=1e-3 rollout.group_size=16
rollout.max_tokens=1 env.cut_turn=continue steps=80 threads=1`.
"""

from birl.types import Feedback, Message, Task

DIGITS = "0123456789"


class Cipher:
    """The sender gets a digit and must answer with the next one; the receiver gets only that answer, and must return
    the original digit. Each earns 1 for its own part, and both 1 if the digit arrives. The two prompts look alike."""

    policy = "sender"

    @staticmethod
    def tasks(config, split):
        return [{"prompt": digit} for digit in DIGITS]

    def __init__(self, task: Task):
        self.digit = prompt(task)
        self.said = ""

    async def start(self) -> str:
        return self.digit * 4 + "="

    async def step(self, reply: Message) -> Feedback:
        word = reply.content[:1] if reply.content[:1] in DIGITS else ""
        if not self.said:
            self.said = word or "0"
            right = float(word == shifted(self.digit, 1))
            return Feedback(prompt=self.said * 4 + "=", policy="receiver", done=False, rewards={"sender": right})
        arrived = float(self.said == shifted(self.digit, 1) and word == self.digit)
        right = float(word == shifted(self.said, -1))
        return Feedback(reward=arrived, rewards={"receiver": right}, score=arrived)

    async def close(self) -> None:
        pass


class Sticks:
    """Nim: take one, two or three sticks; the player who takes the last one wins. A policy plays against an
    earlier version of itself; an invalid move loses. `sticks/best`: the share of the policy's moves that leave a
    multiple of four, if one can."""

    def __init__(self, task: Task):
        self.left, begins = (int(word) for word in prompt(task).split())
        self.policy = "player" if begins else "player@past"
        self.best: list[float] = []

    @staticmethod
    def tasks(config, split):
        return [{"prompt": f"{n} {begins}"} for n in range(2, 8) for begins in (0, 1)]

    async def start(self) -> str:
        return self.seen()

    def seen(self) -> str:
        return f"{self.left}" * 4 + "="

    async def step(self, reply: Message) -> Feedback:
        me, other = self.policy, "player" if self.policy == "player@past" else "player@past"
        word, winner = reply.content[:1], ""
        taken = int(word) if word in ("1", "2", "3") else 0
        if me == "player" and self.left % 4:
            self.best.append(float(taken == self.left % 4))
        if not 1 <= taken <= self.left:
            winner = other
        elif taken == self.left:
            winner = me
        self.left -= taken
        self.policy = other
        if not winner:
            return Feedback(prompt=self.seen(), policy=other, done=False)
        won = 1.0 if winner == "player" else -1.0
        info = {"sticks/best": sum(self.best) / len(self.best)} if self.best else {}
        return Feedback(rewards={"player": won, "player@past": -won}, score=won, info=info)

    async def close(self) -> None:
        pass


def shifted(digit: str, by: int) -> str:
    return DIGITS[(DIGITS.index(digit) + by) % 10]


def prompt(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
