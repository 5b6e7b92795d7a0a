"""Names arguments of Python calls in errors, where the rules that they share with commands name
flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mtcli.core.config.errors import MtcliError, Problem

VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s'\",;]+)"
NAMES = {"set": "overrides", "prompt": "prompts", "logit-bias": "logit_bias"}
ARGUMENTS = "gpus", "device", "top", "tokens", "base", "chat", "stop", "max-tokens", *NAMES


@contextmanager
def naming_arguments(otherwise: str = "") -> Iterator[None]:
    """Inside, errors name arguments: `overrides=["parallel.tp=2"]` for `--set parallel.tp=2`, and
    those of no field are about the argument `otherwise`."""
    try:
        yield
    except MtcliError as error:
        problems = (Problem(*map(_named, problem)) for problem in error.problems)
        named = MtcliError(*problems, code=error.code, hint=_named(error.hint))
        raise named.about(otherwise) from None


def _named(text: str) -> str:
    text = re.sub(r"--global-batch (\d+)", r"--set batch.global_batch_size=\1", text)
    text = re.sub(rf"--set ([\w.]+={VALUE})", r'overrides=["\1"]', text)
    text = re.sub(r"--set ([\w.]+)", r"the override \1", text)
    return re.sub(rf"--({'|'.join(ARGUMENTS)})(?![\w-])", _argument, text)


def _argument(flag: re.Match[str]) -> str:
    return NAMES.get(flag[1], flag[1].replace("-", "_"))
