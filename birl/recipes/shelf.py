"""Finds recipes: in the folder `recipes` here, else in that of birl's repository."""

from pathlib import Path

from birl.errors import BirlError, did_you_mean
from birl.recipes.recipe import ENDING, Recipe, read

OWN = Path(__file__).parents[2]  # the repository, unless birl was installed without it


def root() -> Path:
    """The folder that contains `recipes`; paths in recipes are relative to it. Raises `BirlError` if there is none."""
    for folder in (Path.cwd(), OWN):
        if next((folder / "recipes").rglob(f"*{ENDING}"), None) is not None:
            return folder
    raise BirlError(
        "There are no recipes here, and birl was installed without its repository, which has them. Go to a folder "
        f"with recipes/NAME{ENDING}, or name such a file: birl reproduce my{ENDING}"
    )


def names() -> dict[str, Path]:
    """Files of all recipes by name, such as gpu/tinyzero_countdown."""
    shelf = root() / "recipes"
    files = sorted(shelf.rglob(f"*{ENDING}"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(shelf).as_posix().removesuffix(ENDING): file for file in files}


def find(name: str) -> tuple[Recipe, Path]:
    """The recipe with this name or file, and the folder that its paths are relative to. Raises `BirlError`."""
    if name.endswith((".yaml", ".yml")):
        file = Path(name) if name.endswith(ENDING) else Path(name).with_suffix(ENDING)
        if not file.is_file():
            raise BirlError(f"{name}: there is no {file}, which says what a run of it should give.")
        return read(file.absolute(), file.name.removesuffix(ENDING)), Path.cwd()
    result = names()
    if name not in result:
        raise BirlError(f"There is no recipe {name}.{did_you_mean(name, result)} `birl reproduce` lists them.")
    return read(result[name], name), root()
