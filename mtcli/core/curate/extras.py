"""The libraries of the `curate` extra, imported when a stage needs one."""

from importlib import import_module
from types import ModuleType

from mtcli.core.config.errors import wrong


def require(module: str, stage: str) -> ModuleType:
    """Imports a module of the extra. Raises MtcliError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{stage} needs the package {error.name}, which is not installed"
        raise wrong(message, "pip install 'mtcli[curate]'") from None
