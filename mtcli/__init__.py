"""mtcli: text to a trained, evaluated and profiled large transformer.

`open`, `tokens` and `plan` are its Python interface (docs/reference/python.md).
Each is imported on use.
"""

TYPE_CHECKING = False  # for type checkers it is True; `import mtcli` imports nothing

if TYPE_CHECKING:
    from mtcli.core.config.errors import MtcliError
    from mtcli.core.inference.token_choice import Sampling
    from mtcli.core.library.datasets import TokenData
    from mtcli.core.library.datasets import TokenData as tokens
    from mtcli.core.library.models import Model
    from mtcli.core.library.models import open_checkpoint as open
    from mtcli.core.library.plans import Plan, plan

__all__ = ["Model", "MtcliError", "Plan", "Sampling", "TokenData", "open", "plan", "tokens"]

_HOMES = {
    "open": "library.models:open_checkpoint",
    "Model": "library.models:Model",
    "Sampling": "inference.token_choice:Sampling",
    "tokens": "library.datasets:TokenData",
    "TokenData": "library.datasets:TokenData",
    "plan": "library.plans:plan",
    "Plan": "library.plans:Plan",
    "MtcliError": "config.errors:MtcliError",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mtcli' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f"mtcli.core.{module}"), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
