"""Supported HTTP APIs (dialects). One that is missing in an installation is not served."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

#: the modules of each. One with `ROUTES` ((method, path) -> handler) is for `birl serve`; one with `REPLIES` ((method,
#: path) -> function of the request's data, terms and visit, which returns a `Reply`, or a body to send at once) for
#: agents of a run. Both may have `error`, which makes the body of an error.
DIALECTS: dict[str, tuple[str, ...]] = {
    "openai": ("birl.server.openai",),
    "responses": ("birl.server.responses", "birl.server.gateway_responses"),
    "anthropic": ("birl.server.anthropic",),
    "tokens": ("birl.server.words",),
}


def modules(table: str) -> list[ModuleType]:
    """The installed modules with this table, ROUTES or REPLIES."""
    places = [place for each in DIALECTS.values() for place in each if find_spec(place) is not None]
    return [module for module in map(import_module, places) if hasattr(module, table)]
