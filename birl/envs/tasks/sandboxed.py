"""Tasks whose programs run in a sandbox that all episodes share."""

from dataclasses import dataclass

from birl.envs.tasks.rows import Drawn, at_least, one_of
from birl.sandbox.open import LOCAL, open_sandbox
from birl.sandbox.protocol import Limits, Sandbox


@dataclass(kw_only=True)
class Sandboxed(Drawn):
    seconds: float = 5.0
    """Longest a program may run [s]."""
    memory_mb: int = 256
    """Memory of a program [MiB]."""
    sandbox: str = "auto"
    """Where programs run: auto (the best that works here) | a kind of docs/sandbox.md."""
    workers: int = 0
    """Programs that run at once. 0: one for each core."""

    def check(self, kind: str, **wrong: bool | str) -> None:
        super().check(
            kind,
            **wrong,
            sandbox=one_of([self.sandbox], ("auto", *LOCAL, "modal")),
            seconds="" if self.seconds > 0 else f"is {self.seconds:g}, must be above 0",
            memory_mb=at_least(self.memory_mb, 32),
            workers=at_least(self.workers, 0),
        )

    @property
    def limits(self) -> Limits:
        """Of one program."""
        return Limits(seconds=self.seconds, cpu_seconds=max(1, round(self.seconds + 0.5)), memory_mb=self.memory_mb)


async def shared_sandbox(config: Sandboxed) -> Sandbox:
    return await open_sandbox(config.sandbox, workers=config.workers)
