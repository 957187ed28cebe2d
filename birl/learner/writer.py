"""Checkpoints in the background: the step stands still only while the tensors are copied to CPU memory.

    tensors -> copies in CPU memory -> a thread writes them -> complete, or an error at the next step

At most one is being written: the next one waits for it, and so does the end of the run. Every rank has a thread of its
own, and these talk over a process group of their own, so that their collectives cannot mix with those of training.
"""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.errors import BirlError
from birl.parallel.layout import local
from birl.parallel.ranks import Ranks
from birl.waits import alive, event

LONG = timedelta(days=1)  # a rank may wait for another one whose part takes long to write; one that died ends the wait

#: what is written, and the process group to plan it over
Write = Callable[[dict[str, Tensor], "dist.ProcessGroup | None"], None]


class Writer:
    """Writes one checkpoint after the other. `staged`: bytes that this rank's last one took in CPU memory."""

    def __init__(self) -> None:
        self.staged = 0
        self._thread: threading.Thread | None = None
        self._group: Any = None
        self._error: BaseException | None = None

    def begin(self, tensors: dict[str, Tensor], write: Write, ranks: Ranks) -> None:
        """Copy the tensors, and `write` the copies while the caller goes on. With `ranks` all of them call it. Raises
        what the previous one had failed with."""
        self.wait()
        if self._group is None and not ranks.alone:
            self._group = dist.new_group(backend="gloo", timeout=LONG)
        copies = {name: staged(tensor) for name, tensor in tensors.items()}
        self.staged = sum(local(copy).nbytes for copy in copies.values())
        self._thread = threading.Thread(target=self._run, args=(copies, write), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what a checkpoint failed with that was begun; one that is still being written is no failure."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what it failed with, once."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)
                alive()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """`wait` where something else has ended the run already: a failure is printed, not raised."""
        try:
            self.wait()
        except BirlError as error:
            print(f"birl: {error}", file=sys.stderr, flush=True)

    def _run(self, copies: dict[str, Tensor], write: Write) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread, and of those that begin: a second OpenMP pool would slow the first
        try:
            write(copies, self._group)
            event("a checkpoint was written")
        except BaseException as error:
            self._error = error
        finally:
            copies.clear()
            torch.set_num_threads(threads)


def staged(tensor: Tensor) -> Tensor:
    """A copy in CPU memory; of a DTensor one of this rank's part, that still says which part it is."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return DTensor(tensor.to_local().to("cpu", copy=True), tensor._spec, requires_grad=False)
    return tensor.to("cpu", copy=True)
