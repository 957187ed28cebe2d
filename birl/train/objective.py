"""The policy's loss on the micro-batches of one optimizer step.

prepare  (rank 0) micro-batches -> `LossInputs` of each: what depends on all micro-batches, before the first gradient
loss     (every rank) one micro-batch and its `LossInputs` -> the loss, and figures
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from birl.algorithms import corrections, selection
from birl.algorithms.custom import NamedFunction, part
from birl.algorithms.policy import policy_loss
from birl.algorithms.preference import online_dpo
from birl.algorithms.surrogates import SURROGATES, Surrogate
from birl.algorithms.values import value_loss
from birl.data.pack import Batch
from birl.data.support import upload
from birl.errors import BirlError
from birl.learner.critic import critic_figures
from birl.learner.learner import Learner, Loss

if TYPE_CHECKING:
    from birl.config import schema

TENSORS = ("entropy", "group", "ref_logp", "turn", "versions")  # that a surrogate may take as keyword arguments
UNCUT = 1e30  # M2PO, arXiv:2510.01161, leaves out tokens and bounds no weight: what pulls back is kept, however far
ALL_SURROGATES = {**SURROGATES, "online_dpo": online_dpo}


def surrogate_of(keys: "schema.Algorithm") -> NamedFunction:
    """The function that algorithm.surrogate names, with its options. Raises `BirlError`."""
    own = (keys.surrogate_args, TENSORS, ("logp", "old_logp", "advantages", "sample"))
    return part("algorithm.surrogate", keys.surrogate, ALL_SURROGATES, keys, *own)


def keeps_reference(keys: "schema.Algorithm", surrogate: NamedFunction) -> bool:
    """Whether a frozen copy of the first weights is needed."""
    return keys.kl_coef > 0 or "ref_logp" in surrogate.tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Tensors [N] of one micro-batch: reference log-probs, factor of each token's loss (None: 1), tokens held back by
    KL-Cov."""

    ref_logp: Tensor | None = None
    factor: Tensor | None = None
    held: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Objective:
    """The policy's loss. `start`: the policy in the denominator of the importance ratio: behaviour, recompute (the
    learner before the first update), now (the learner itself, ratio 1) or interpolate. `corrected`: tokens are weighted
    by the ratio of that policy to the one that sampled. `reference`: micro-batches -> log-probs [N];
    `logp_and_entropy`: micro-batches -> both under the current weights [2, N]."""

    keys: "schema.Algorithm"
    critic_keys: "schema.Critic"
    start: str
    corrected: bool
    learner: Learner
    reference: Callable[[Sequence[Batch]], list[Tensor]] | None
    logp_and_entropy: Callable[[Sequence[Batch]], list[Tensor]]
    surrogate: NamedFunction

    def reference_logprobs(self, batches: Sequence[Batch]) -> Sequence[Tensor | None]:
        """(rank 0) The reference's log-probs, None where the loss does not need them. Updates do not change them."""
        return self.reference(batches) if self.reference and self.needs_reference() else [None] * len(batches)

    def prepare(self, batches: Sequence[Batch], seed: int, refs: Sequence[Tensor | None]) -> list[LossInputs]:
        """(rank 0) The inputs of each micro-batch's loss. Masks that rank or average tokens do so over the whole step,
        so that the split into micro-batches changes nothing."""
        keys = self.keys
        if not self.needs_statistics():
            return [LossInputs(ref_logp=r) for r in refs]
        sizes = [len(b.entry) for b in batches]
        logp, entropy = torch.cat(self.logp_and_entropy(batches), dim=1).cpu()
        behaviour, advantages, sample = (
            torch.cat([getattr(b, name).cpu() for b in batches]) for name in ("logprobs", "advantages", "sample")
        )
        order = sample.argsort(stable=True)  # ties and draws must not depend on how the samples were packed
        logp, entropy, behaviour, advantages, sample = (
            x[order] for x in (logp, entropy, behaviour, advantages, sample)
        )
        moved = logp - behaviour
        factor = torch.ones_like(logp)
        if keys.second_moment > 0:
            factor *= corrections.second_moment_mask(moved, advantages, keys.second_moment)
        if keys.reject != "none":
            factor *= ~corrections.REJECTIONS[keys.reject](moved, sample, advantages, limit=keys.reject_limit)
        held = None
        match keys.entropy_control:
            case "top_entropy":
                factor *= selection.top_entropy(entropy, keys.entropy_share)
            case "clip_cov":
                generator = torch.Generator().manual_seed(seed % 2**63)
                cov = selection.covariance(logp, advantages)
                limits = {"low": keys.covariance_low, "high": keys.covariance_high}
                factor *= ~selection.clip_cov(cov, share=keys.entropy_share, generator=generator, **limits)
            case "kl_cov":
                held = selection.kl_cov(selection.covariance(logp, advantages), share=keys.entropy_share)

        def pieces(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(batches) if x is None else torch.empty_like(x).scatter_(0, order, x).split(sizes)

        columns = zip(refs, pieces(factor), pieces(held), strict=True)
        return [LossInputs(ref_logp=r, factor=f, held=h) for r, f, h in columns]

    def loss(self, known: LossInputs, kl_coef: float, value_weight: float) -> Loss:
        return partial(self._loss, known=known, kl_coef=kl_coef, value_weight=value_weight)

    def _loss(
        self, logp: Tensor, entropy: Tensor, batch: Batch, *, known: LossInputs, kl_coef: float, value_weight: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        keys = self.keys
        if self.only_compares():  # the backward pass need not compute their logits again
            logp, entropy = logp.detach(), entropy.detach()
        on = {
            n: None if t is None else upload(t, logp.device)
            for n, t in (("f", known.factor), ("h", known.held), ("r", known.ref_logp))
        }
        factor, old_logp = on["f"], self.proximal(logp.detach(), batch)
        if self.corrected:
            weight = self.correction(old_logp - batch.logprobs, batch.sample)
            factor = weight if factor is None else factor * weight
        tensors = {"entropy": entropy, "group": batch.group, "turn": batch.turn, "versions": batch.versions}
        fresh = batch.versions.to(logp.device) == self.learner.version  # sampled by these very weights
        tensors["ref_logp"] = on["r"]  # pyright: ignore[reportArgumentType]
        loss, figures = policy_loss(
            logp,
            entropy,
            old_logp=old_logp,
            advantages=batch.advantages,
            sample=batch.sample,
            weights=batch.weights,
            surrogate=partial(self.checked, self.surrogate.bound(tensors)),
            factor=factor,
            ref_logp=on["r"],
            kl=keys.kl,
            kl_coef=kl_coef if keys.kl_in == "loss" else 0.0,
            kl_from=batch.logprobs if keys.kl_corrected else None,  # tokens are its, however old it is
            held=on["h"],
            held_coef=keys.held_coef * ~fresh,  # nothing has moved: the sign of what rounding leaves is no direction
            entropy_coef=keys.entropy_coef,
        )
        figures |= {"gap": (logp - batch.logprobs).abs() * fresh, "fresh": fresh.float()}
        if batch.divergence is not None:
            told = batch.weights * (not keys.hint) if batch.hinted is None else batch.hinted.weights
            loss = loss + keys.teacher_coef * (batch.divergence * told).sum()
            figures |= {"divergence": batch.divergence * (told > 0), "compared": (told > 0).float()}
        if batch.observed_logprobs is not None and batch.observed_weights is not None:
            loss = loss - keys.observation_coef * (batch.observed_logprobs * batch.observed_weights).sum()
            figures["observed"] = -batch.observed_logprobs
            figures["observations"] = torch.ones_like(batch.observed_logprobs)
        if batch.predicted is not None:
            each, clipped = value_loss(batch.predicted, batch.values, batch.returns, clip=self.critic_keys.clip)
            loss = loss + self.critic_keys.coef * value_weight * each.sum()
            figures |= critic_figures(batch.predicted, batch.returns, each, clipped)
        if self.surrogate.own and logp.requires_grad and not loss.requires_grad:
            raise BirlError(f"{self.surrogate.own}: its loss has no gradient; compute it from logp without detach().")
        loss.own = self.surrogate.own  # pyright: ignore  named if the backward pass fails
        return loss, figures

    def proximal(self, logp: Tensor, batch: Batch) -> Tensor:
        """Log-probs in the denominator of the importance ratio [N]."""
        match self.start:
            case "now":
                return logp
            case "interpolate":
                now = batch.versions.max().clamp(min=self.learner.version) if len(batch.versions) else 0
                return corrections.proximal(batch.logprobs, logp, batch.versions, now)
            case _:
                return batch.proximal

    def checked(self, function: Callable[..., Any], logp: Tensor, *rest: Tensor) -> Surrogate:
        """The surrogate's result, checked. A user's function may return the tensor of losses alone."""
        result = function(logp, *rest)
        if isinstance(result, Tensor):
            result = Surrogate(result, (logp - rest[0]).detach().exp(), torch.zeros_like(logp, dtype=torch.bool))
        shapes = [getattr(x, "shape", None) for x in result] if isinstance(result, Surrogate) else []
        if shapes != [logp.shape] * 3:
            whole = bool(shapes) and None not in shapes
            told = ", ".join(str(tuple(s)) for s in shapes if s is not None)
            what = f"shapes {told}" if whole else f"{result!r:.200}"
            raise BirlError(
                f"algorithm.surrogate={self.keys.surrogate}: must give the loss of each of {len(logp)} "
                f"tokens, as a tensor or a Surrogate, not {what}."
            )
        return result

    def correction(self, log_ratio: Tensor, sample: Tensor) -> Tensor:
        keys, auto = self.keys, self.keys.correction == "auto"
        return corrections.importance(
            log_ratio,
            sample,
            level=keys.correction_level,
            mode="truncate" if auto else keys.correction,
            low=keys.correction_low,
            high=UNCUT if auto and keys.second_moment > 0 else keys.correction_high,
        )

    def needs_reference(self) -> bool:
        """Whether the loss (not only the reward) uses the reference."""
        keys = self.keys
        return (keys.kl_coef > 0 and keys.kl_in == "loss") or "ref_logp" in self.surrogate.tensors

    def only_compares(self) -> bool:
        """Whether the divergence from a teacher alone has a gradient: the log-probs of sampled tokens are figures."""
        keys = self.keys
        alone = keys.advantage == "zero" and keys.teacher_divergence != "sampled" and keys.surrogate in SURROGATES
        return alone and not (keys.kl_coef or keys.entropy_coef or keys.entropy_control == "kl_cov")

    def needs_statistics(self) -> bool:
        """Whether a mask depends on all tokens of the step."""
        keys = self.keys
        return keys.second_moment > 0 or keys.reject != "none" or keys.entropy_control != "none"
