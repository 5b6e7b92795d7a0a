"""Imports libraries of the `curate` and `ray` extras when a stage needs one."""

from importlib import import_module
from types import ModuleType

from mtcli.core.config.errors import wrong


def require(module: str, stage: str, extra: str = "curate") -> ModuleType:
    """Imports a module of an extra. Raises MtcliError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{stage} needs the package {error.name}, which is not installed"
        raise wrong(message, f"pip install 'mtcli[{extra}]'") from None
