"""Images of running requests: their vision features are cached while the weights are the same."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from birl.engine.scheduler import ScheduledTokens
from birl.models.vision import Features, Seen, family_of, look, mutual, plain, still
from birl.text.pictures import Processed

KEPT = 2**28  # bytes of features


class Looks:
    """Vision features by the digest of their image; keeps the newest `KEPT` bytes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known: OrderedDict[str, Features] = OrderedDict()
        self.version = -1
        self.frozen = bool(still(model))

    def at(self, version: int) -> None:
        """Set the version of the weights; features of another version are dropped."""
        if version != self.version and not self.frozen:
            self.known.clear()
        self.version = version

    def of(self, picture: Processed) -> Features:
        if picture.digest not in self.known:
            self.known[picture.digest] = look(self.model, [picture])[0]
        self.known.move_to_end(picture.digest)
        while len(self.known) > 1 and sum(f.nbytes for f in self.known.values()) > KEPT:
            self.known.popitem(last=False)
        return self.known[picture.digest]

    def row(
        self, plan: Sequence[ScheduledTokens], tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Seen | None]:
        """Tokens [T] of a step, positions [T] -> vocabulary tokens, positions [T] or [3, T], vision features."""
        if all(work.request.sight is None for work in plan):
            return tokens, positions, None
        parts: list[Features] = []
        places: list[list[int]] = []
        axes: list[np.ndarray] = []
        family, place = family_of(self.model), 0
        for work in plan:
            sight, count = work.request.sight, len(work.tokens) + len(work.drafts)
            for picture, rows, own in () if sight is None else sight.within(work.start, len(work.tokens)):
                parts.append(self.of(picture)[torch.tensor(rows, dtype=torch.int64, device=tokens.device)])
                places.append([place + p for p in own])
            if family is not None and family.axes:
                counted = np.broadcast_to(np.arange(work.start, work.start + count), (3, count))
                axes.append(counted if sight is None else sight.at(work.start, count))
            place += count
        if axes:
            positions = torch.from_numpy(np.concatenate(axes, axis=1)).to(tokens.device, torch.int64)
        if not parts:
            return plain(tokens), positions, None
        where = torch.tensor([p for own in places for p in own], dtype=torch.int64, device=tokens.device)
        return plain(tokens), positions, Seen(where, Features.joined(parts), mutual(self.model, places))
