"""RL2's environments: a function `step(state, action, extra_info)` on text, sync or async, and optionally
`reset(extra_info)` beside it, which gives the first state.

`state` is all that the model saw, as text with its special tokens; `action` what it answered, without the end token.
The function returns {"next_state", "reward", "score", "done", "extra_info"}, of which only `reward` and `done` must be
there. Where `next_state` begins with state + action, the model goes on token by token; otherwise it sees the new text
alone.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from birl.envs.calls import called
from birl.errors import BirlError
from birl.types import Conversation, Feedback, Message, Task

KEYS = ("next_state", "reward", "score", "done", "extra_info")


class StepFunction:
    """One episode of such a function. `text` renders a prompt of messages; `options` go to the function by name."""

    def __init__(
        self, step: Callable[..., Any], task: Task, text: Callable[[Conversation], str], options: Mapping[str, Any]
    ) -> None:
        self.function, self.task, self.text, self.options = step, task, text, dict(options)
        self.extra: Any = task.columns.get("extra_info", dict(task.columns))
        self.state = ""

    async def start(self) -> str:
        reset = getattr(inspect.getmodule(self.function), "reset", None)
        self.state = self.text(self.task.prompt) if reset is None else await called(reset, self.extra)
        if not isinstance(self.state, str):
            raise BirlError(f"reset must return the first state as text, not {type(self.state).__name__}")
        return self.state

    async def step(self, reply: Message) -> Feedback:
        result = await called(partial(self.function, self.state, reply.content, self.extra, **self.options))
        if not isinstance(result, Mapping) or not {"reward", "done"} <= set(result):
            raise BirlError(f"step must return a dict with reward and done ({', '.join(KEYS)}), not {result!r:.200}")
        if unknown := sorted(set(result) - set(KEYS)):
            raise BirlError(f"step returned {unknown[0]!r}; known are {', '.join(KEYS)}")
        done, after = bool(result["done"]), result.get("next_state")
        if not done and not isinstance(after, str):
            raise BirlError(f"step must return next_state as text while done is false, not {after!r:.200}")
        self.state, self.extra = after if isinstance(after, str) else "", result.get("extra_info", self.extra)
        reward, score = result["reward"], result.get("score")
        return Feedback(prompt=None if done else self.state, reward=reward, score=score, done=done)

    async def close(self) -> None:
        pass
