"""What every section of the config is: a frozen pydantic model that refuses unknown keys."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mtcli.core.spec.foreign import names_a_file, shown

LARGEST = 10**9  # of a config's whole numbers: none overflows, and its divisors are found at once
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


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
