"""Makes a Gymnasium environment by name, from a package or from a file."""

from pathlib import Path
from typing import Any

from birl.envs.adapters.package import arguments, imported, unknown
from birl.errors import BirlError, first_line
from birl.named import from_file

KIND = "gymnasium"


def made(id: str, parameters: list[str], drawn: bool) -> Any:
    """The environment. Raises `BirlError` where there is none."""
    gymnasium, mode = imported("gymnasium", KIND), {"render_mode": "ansi"} if drawn else {}
    place, _, name = id.rpartition(":")
    own = place.endswith(".py")
    if own and not Path(place).is_file():
        raise BirlError(f"env.id={id}: there is no file {place} in {Path.cwd()}.")
    try:
        if own:
            from_file(Path(place))
        return gymnasium.make(name if own else id, **mode, **arguments(parameters))
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
        raise unknown("env.id", id, gymnasium.registry) from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        told = first_line(error)
        raise BirlError(f"env.id={id} env.parameters={parameters}: {told}") from error
