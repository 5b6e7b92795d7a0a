"""Fetches models of the Hugging Face hub, named hub:owner/name or hub:owner/name@revision.

Files come through the cache of `huggingface_hub`, by its settings: HF_TOKEN or the stored token,
HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. Configs and tokenizers are fetched first, and weights when a
checkpoint is opened; of these safetensors alone, so that no pickle is ever here.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.nameable import HUB, HUB_NAME
from mtcli.core.config.untrusted import shown

REVISION = re.compile(r"[\w./-]{1,200}")
# A revision has no slash, but for those that the hub makes, such as refs/convert/parquet.
DATASET = re.compile(
    rf"{HUB}(?P<repository>{HUB_NAME.pattern})"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?(?P<path>/.*)?"
)
CONFIGS = ("config.json", "adapter_config.json")
SMALL = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
LARGE = ("*/*", "*.onnx*", "pytorch_model*")  # of what SMALL would match
HINT = "a name of the hub is hub:owner/name, or hub:owner/name@revision"


class HubName(NamedTuple):
    """A repository of the hub and its revision; empty is the newest."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{HUB}{self.repository}{'@' * bool(self.revision)}{self.revision}"


def is_hub(source: str | Path) -> bool:
    """Says whether a name is one of the hub."""
    return str(source).startswith(HUB)


def parse_hub(source: str | Path) -> HubName:
    """Parses a name of the hub. Raises MtcliError where it is none."""
    repository, at, revision = str(source).removeprefix(HUB).partition("@")
    is_name = HUB_NAME.fullmatch(repository) and ".." not in repository
    if not is_name or (at and not REVISION.fullmatch(revision)):
        raise wrong(f"{shown(str(source))} is no name of the hub", HINT)
    return HubName(repository, revision)


def fetch_config(source: str | Path) -> Path:
    """Fetches what says a repository's model; returns its folder in the cache, whose name is the
    commit. Raises MtcliError where the hub does not give it."""
    return _fetch(parse_hub(source), list(CONFIGS), [])


def fetch_small(source: str | Path) -> Path:
    """Fetches a repository's configs and tokenizer; returns its folder in the cache, whose name is
    the commit. Raises MtcliError where the hub does not give it."""
    return _fetch(parse_hub(source), list(SMALL), list(LARGE))


def pinned(source: str) -> str:
    """Returns a name of the hub with its commit, so that it means the same later."""
    return str(parse_hub(source)._replace(revision=fetch_config(source).name))


def fetch_files(source: str | Path, folder: Path, names: list[str]) -> None:
    """Fetches files of a repository into the folder that `fetch_small` returned."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        name = parse_hub(source)._replace(revision=folder.name)
        _fetch(name, missing, [])


def push_folder(folder: Path, repository: str, message: str, private: bool = False) -> str:
    """Creates a repository, if there is none, and uploads a folder to it; returns its address.

    Raises MtcliError (exit 1) where the hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())
    with _explained(HubName(repository)):
        url = str(api.create_repo(repository, private=private, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    return url


def dataset_address(source: str) -> str:
    """Returns the address of hub:owner/name[@revision][/path], a dataset or files of it, with its
    commit. Raises MtcliError where it is no such name, or the hub has none."""
    from huggingface_hub import HfApi

    if not (parts := DATASET.fullmatch(source)):
        hint = "hub:owner/name, hub:owner/name/file.parquet or hub:owner/name@revision/*.parquet"
        raise wrong(f"{shown(source)} is no dataset of the hub", hint)
    name = HubName(parts["repository"], parts["revision"] or "")
    with _explained(name):
        api = HfApi(endpoint=endpoint())
        commit = api.dataset_info(name.repository, revision=name.revision or None).sha
    return f"hf://datasets/{name.repository}@{commit}{parts['path'] or ''}"


def endpoint() -> str | None:
    """Returns the hub's address where the user names another."""
    return os.environ.get("HF_ENDPOINT")


def require_token(repository: str, flag: str) -> None:
    """Raises MtcliError where there is no token to push with, or the name is none."""
    from huggingface_hub import get_token

    if not HUB_NAME.fullmatch(repository):
        raise wrong(f"{shown(repository)} is no name of the hub", "owner/name", flag)
    if get_token() is None:
        hint = "set HF_TOKEN to one that may write, or `hf auth login`"
        raise wrong("there is no token of the Hugging Face hub", hint, flag)


def _fetch(name: HubName, patterns: list[str], but: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _explained(name):
        folder = snapshot_download(
            name.repository,
            revision=name.revision or None,
            allow_patterns=patterns,
            ignore_patterns=but,
            endpoint=endpoint(),
        )
    assert isinstance(folder, str), folder
    return Path(folder)


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Raises MtcliError in place of the client's errors, which are of many packages."""
    from huggingface_hub import errors

    try:
        yield
    except MtcliError:
        raise
    except errors.GatedRepoError:
        hint = "accept its terms on its page, and set HF_TOKEN or `hf auth login`"
        raise wrong(f"the hub gives {name} to those who accepted its terms alone", hint) from None
    except errors.RevisionNotFoundError:
        hint = "a branch, a tag or a commit, behind @"
        raise wrong(f"{name.repository} has no revision {shown(name.revision)}", hint) from None
    except errors.RepositoryNotFoundError:
        hint = "is it private? set HF_TOKEN, or `hf auth login`; or name a file or folder here"
        raise wrong(f"the hub has no {name.repository}, or not for this token", hint) from None
    except Exception as error:  # no network, a refusal, an incomplete cache: many kinds of error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"the hub does not give {name}, and its cache has no copy: {reason}"
        hint = "check the network, HF_ENDPOINT and HF_TOKEN; or, from where the hub is reached, "
        folder = name.repository.partition("/")[2]
        hint += f"`hf download {name.repository} --local-dir {folder}`, and name that folder"
        raise wrong(message, hint) from None
