"""What is computed in a training step."""

from dataclasses import dataclass

from birl.errors import BirlError

KEEPS = ("all", "half", "inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`batch` tokens go through the model in micro-batches of `microbatch` tokens a share, packed from sequences of
    `sequence` tokens.

    keep: what of a layer stays in memory for its backward pass. all; half: attention's result and that of every second
    product, the rest is computed again (torchtitan's selective checkpointing); inputs: the layer's input alone
    (learner.gradient_checkpointing).
    logits: tokens whose logits are there at once; 0: the learner's chunks.
    once: a token goes to a machine once, whatever experts it has there (DeepEP), not once for each expert.
    """

    batch: int
    microbatch: int
    sequence: int
    keep: str = "inputs"
    logits: int = 0
    once: bool = False

    def __post_init__(self) -> None:
        """Raises `BirlError` naming the key."""
        if self.keep not in KEEPS:
            raise BirlError(f"keep={self.keep}: {', '.join(KEEPS)}.")
        for name in ("batch", "microbatch", "sequence"):
            if getattr(self, name) < 1:
                raise BirlError(f"{name}={getattr(self, name)}: a number of tokens, at least 1.")
