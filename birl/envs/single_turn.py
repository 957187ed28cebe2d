"""One prompt, one reply. Reward functions, if any, score the reply afterwards (`rollout/group.py`)."""

from birl.types import Feedback, Message, Task


class SingleTurn:
    def __init__(self, task: Task) -> None:
        self.task = task

    async def start(self) -> tuple[Message, ...] | str:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        return Feedback(done=True)

    async def close(self) -> None:
        pass
