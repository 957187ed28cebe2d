"""Conditions on several keys."""

from birl.config.check import setting, value_of
from birl.config.keys import documentation
from birl.config.rules.computed import COMPUTED
from birl.config.rules.conflicts import CONFLICTS
from birl.config.rules.unread import UNREAD
from birl.config.schema import Config


def rules(config: Config) -> list[str]:
    """All reasons why the keys cannot be combined; empty if they can."""
    wrong = [
        text.format(c=config)
        for kind, texts in CONFLICTS
        if isinstance(config, kind)
        for text, holds in texts.items()
        if holds(config)
    ]
    for kind, told in COMPUTED:
        wrong += told(config) if isinstance(config, kind) else ()
    return wrong + _unread(config)


def _unread(config: Config) -> list[str]:
    """Keys that were set but would have no effect: they are refused, as the user relies on them."""
    docs, why = documentation(type(config)), dict[str, str]()
    changed = [key for key, doc in docs.items() if value_of(config, key) != doc.default]
    for text, read in UNREAD.items():
        keys, _, reason = text.partition(": ")
        if (idle := [key for key in changed if _named(key, keys)]) and not read(config):
            why = dict.fromkeys(idle, reason.format(c=config)) | why  # the first reason for each key
    return [f"{setting(config, key)}: has no effect because {reason}." for key, reason in why.items()]


def _named(key: str, keys: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in keys.split())
