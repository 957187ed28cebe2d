"""Supported HTTP APIs (dialects). One that is missing in an installation is not served."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An HTTP API. `server`: module for `birl serve`, with `ROUTES` ((method, path) -> handler). `gateway`: module for
    agents of a run, with `REPLIES` ((method, path) -> function of the request's data, terms and visit, which returns a
    `Reply`, or a body to send at once). Either may have `error`, which makes the body of an error."""

    server: str
    gateway: str = ""


DIALECTS: dict[str, Dialect] = {
    "openai": Dialect(server="birl.server.openai", gateway="birl.server.gateway_openai"),
    "responses": Dialect(server="birl.server.responses", gateway="birl.server.gateway_responses"),
    "anthropic": Dialect(server="birl.server.anthropic", gateway="birl.server.gateway_anthropic"),
    "tokens": Dialect(server="birl.server.words"),
}


def modules(side: str) -> list[ModuleType]:
    """The installed modules of `server` or `gateway`."""
    places = [getattr(dialect, side) for dialect in DIALECTS.values()]
    return [import_module(place) for place in places if place and find_spec(place) is not None]
