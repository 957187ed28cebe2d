"""What the keys of a schema are: numbers in a range, and names that a function of the user's may take the place of.

A choice is a `Literal`, a number one of these types, or `Annotated[int, Field(ge=1, le=65535)]` where a single key has
the range. The text under a field is its help, and names the unit in brackets: `Longest an update may take [s]`.
"""

from typing import Annotated

from pydantic import ConfigDict, Field

MOST = 2**31 - 1  # of a whole number: a larger one means nothing, and libraries fail at it
LONGEST = 1e7  # seconds: more than clocks and threads can wait for

Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Processes = Annotated[int, Field(ge=1, le=2**16)]
Threads = Annotated[int, Field(ge=0, le=1024)]
Workers = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]

Real = Annotated[float, Field()]  # finite, as all of them
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Nucleus = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[float, Field(ge=0, le=1e6)]
Wait = Annotated[float, Field(gt=0, le=LONGEST)]
Deadline = Annotated[float, Field(ge=0, le=LONGEST)]  # 0 has a meaning of its own

#: a part of the user's own, as file.py:NAME or package.module:NAME; its rules see to the rest
OWN = r":|\.py$"
Function = Annotated[str, Field(pattern=OWN, examples=["my_file.py:my_function"])]
EngineClass = Annotated[str, Field(pattern=OWN, examples=["my_file.py:MyEngine"])]

Gpu = Annotated[str, Field(pattern=r"^cuda:\d+$", examples=["cuda:1"])]


class Section:
    """A dataclass of keys."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
