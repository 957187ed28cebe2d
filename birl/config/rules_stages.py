"""Rules for `birl sft`, `rm` and `dpo`. Standard library only."""

from birl.config.schema import DPO, SFT, Pairs, Stage
from birl.config.words import said, without_effect


def stage_problems(config: Stage) -> list[str]:
    found = []
    if config.validation.every and not (config.data.validation or config.data.validation_split):
        reason = "there is no held-out data; set data.validation or data.validation_split"
        found += without_effect(config, "validation.every", reason)
    found += without_effect(
        config, "model.tool_format", "the rows have no tools; `birl rl`, `eval` and `serve` read it"
    )
    if isinstance(config, SFT):
        found += _texts(config)
    if isinstance(config.data, Pairs):
        keys = ("chosen_column", "rejected_column")
        found += [f"data.{key} is empty: name a column." for key in keys if not getattr(config.data, key)]
    if isinstance(config, DPO):
        found += _preference(config)
    return found


def _texts(config: SFT) -> list[str]:
    roles = config.data.train_on
    if not roles:
        return ["data.train_on is empty: name roles, as in data.train_on=[assistant], or data.train_on=[all]."]
    if "all" in roles and len(roles) > 1:
        return [f"{said(config, 'data.train_on')}: all includes every role; use data.train_on=[all]."]
    return []


# Keys of `preference` that only some losses read.
READ_BY = {
    "preference.label_smoothing": ("dpo", "robust"),
    "preference.margin": ("simpo",),
    "preference.nll_coef": ("dpo", "ipo", "hinge", "robust", "simpo"),
    "preference.desirable_weight": ("kto",),
    "preference.undesirable_weight": ("kto",),
    "preference.reference": ("dpo", "ipo", "hinge", "robust", "kto"),
    "data.label_column": ("kto",),
}


def _preference(config: DPO) -> list[str]:
    loss, found = config.preference.loss, []
    for key, losses in READ_BY.items():
        if loss not in losses:
            found += without_effect(config, key, f"preference.loss={loss} does not read it")
    if loss == "robust" and config.preference.label_smoothing == 0:
        found.append("preference.loss=robust: is dpo while preference.label_smoothing=0; set that, to 0.1 say.")
    if loss == "kto" and not (config.preference.desirable_weight or config.preference.undesirable_weight):
        found.append("preference.desirable_weight=0 and preference.undesirable_weight=0: nothing would be trained.")
    if loss == "kto" and config.batch_size == 1:
        found.append("batch_size=1: preference.loss=kto compares rows of a batch with one another; set 2 or more.")
    if loss == "kto" and config.preference.reference == "precomputed":
        found.append(
            "preference.reference=precomputed: preference.loss=kto needs the reference on answers that are put "
            "together anew in every step; set preference.reference=live."
        )
    if config.data.label_column:
        reason = "with data.label_column a row has one answer, in data.chosen_column"
        found += without_effect(config, "data.rejected_column", reason)
    return found
