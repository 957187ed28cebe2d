"""Tasks whose programs run in a sandbox that all episodes share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Positive, Whole
from birl.envs.tasks.rows import Drawn
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits, Sandbox

Memory = Annotated[int, Field(ge=32)]  # MiB; less holds no interpreter


@dataclass(kw_only=True)
class Sandboxed(Drawn):
    seconds: Positive = 5.0
    """Time limit of a program [s]."""
    memory_mb: Memory = 256
    """Memory limit of a program [MiB]."""
    sandbox: Literal["auto", "zygote", "bubblewrap", "landlock", "process", "modal"] = "auto"
    """Sandbox for programs (docs/sandbox.md). auto: the best that works here."""
    workers: Whole = 0
    """Concurrent programs. 0: one per CPU core."""

    @property
    def limits(self) -> Limits:
        """Limits of one program."""
        return Limits(seconds=self.seconds, cpu_seconds=max(1, round(self.seconds + 0.5)), memory_mb=self.memory_mb)


async def shared_sandbox(config: Sandboxed) -> Sandbox:
    return await open_sandbox(config.sandbox, workers=config.workers)
