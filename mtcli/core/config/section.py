"""What every section of the config is: a frozen pydantic model that refuses unknown keys, and the
kinds of numbers that its fields are.

Every number of the config has a range, outside of which it would be a slip of the pen. The range is
the field's own bounds: `fields.py` puts it into words for errors and for docs/config.md.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mtcli.core.config.untrusted import names_a_file, shown

LARGEST = 10**9  # of a config's whole numbers: none overflows, and its divisors are found at once
MAX_RANKS = 2**20
SMALLEST = 1e-30  # what is nearer to 0 is lost in products of float32


def _is_number(value: Any) -> Any:
    """TOML's booleans are no numbers, though Python's are."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    if isinstance(value, float) and 0.0 < abs(value) < SMALLEST:
        raise ValueError(f"should be 0 or at least {SMALLEST:g}")
    return value


Int = Annotated[int, BeforeValidator(_is_number)]
Real = Annotated[float, BeforeValidator(_is_number)]
Positive = Annotated[Int, Field(ge=1, le=LARGEST)]
Whole = Annotated[Int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[Int, Field(ge=1, le=MAX_RANKS)]
Fraction = Annotated[Real, Field(ge=0.0, lt=1.0)]
Count = Annotated[Int, Field(ge=0)]


def _path(text: str) -> str:
    if not names_a_file(text):
        raise PydanticCustomError("no_path", "{text} names nothing", {"text": shown(text)})
    return text


PathText = Annotated[str, AfterValidator(_path)]


class Section(BaseModel):
    """A frozen config section that refuses unknown keys, infinity and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
