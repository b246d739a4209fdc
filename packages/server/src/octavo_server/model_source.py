"""Where a model's files are: the starter model, a path, or the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIXES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]

_POOLING_FILE = "*_Pooling/config.json"


class ResolvedModel(NamedTuple):
    """A model on the local disk.

    Attributes:
        path: Folder or .gguf file.
        name: What to call it in the API, by default.
    """

    path: Path
    name: str


def resolve_model(
    model: str,
    revision: str | None = None,
    on_progress: ProgressCallback | None = None,
    *,
    needs_weights: bool = True,
) -> ResolvedModel:
    """Find a model's files, fetching them if need be.

    Args:
        model: Empty for the starter model; a folder or .gguf file; or a hub id, with the
            name of a file behind a colon to take one GGUF file (``org/repo:file.gguf``).
        revision: Branch, tag or commit on the hub.
        on_progress: Called while the starter model is fetched.
        needs_weights: Whether a folder without weights is refused.

    Raises:
        ModelError: One line that names the path or id, and what is missing.
    """
    if not model:
        from octavo_server.starter_model import STARTER_MODEL, starter_gguf

        return ResolvedModel(starter_gguf(on_progress), STARTER_MODEL.name)
    path = Path(model).expanduser()
    if path.exists():
        _check_path(path, needs_weights)
        return ResolvedModel(path.resolve(), model)
    if _looks_like_path(model):
        raise ModelError(f"{model} does not exist.", field="model")
    return ResolvedModel(_fetch_from_hub(model, revision), model)


def resolve_plan_source(model: str, revision: str | None = None) -> ResolvedModel:
    """Find what a model can be planned from; of a model on the hub, fetch config.json alone.

    Args:
        model: As in `resolve_model`, or a config.json. A folder needs no more than that file.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelError: One line that names the path or id, and what is missing.
    """
    path = Path(model).expanduser()
    if not model or (_looks_like_path(model) and not path.exists()):
        return resolve_model(model, revision)
    if path.exists():
        return ResolvedModel(path.resolve(), model)
    if ":" in model:
        raise ModelError(
            f"{model}: a GGUF file is planned from the disk, and not fetched for it; download it, "
            f"or plan the model that it was made from with --quantization.",
            field="model",
        )
    return ResolvedModel(
        _ask_hub(model, revision, lambda: _fetch_file(model, "config.json", revision)), model
    )


def _looks_like_path(model: str) -> bool:
    """True for what can't be a hub id; then the network is not asked."""
    hub_id, _, file = model.partition(":")
    if file:
        return not (file.endswith(".gguf") and _HUB_ID.fullmatch(hub_id))
    if model.endswith(_FILE_SUFFIXES) or not _HUB_ID.fullmatch(model):
        return True
    # A folder of that name here makes a mistyped path likelier than an organization.
    return "/" in model and Path(model.split("/", 1)[0]).is_dir()


def _check_path(path: Path, needs_weights: bool) -> None:
    """Refuse what is plainly no model, before anything heavy is imported."""
    if path.is_dir():
        _check_folder(path, needs_weights)
        return
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path} is a file but not a .gguf file; name the folder that it is in.", field="model"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", field="model") from error
    if magic != b"GGUF":
        state = "is empty" if not magic else "does not start with 'GGUF'"
        raise ModelError(f"{path} is no GGUF file: it {state}.", field="model")


def _check_folder(folder: Path, needs_weights: bool) -> None:
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror}.", field="model") from error
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if needs_weights and not any(name.endswith(".safetensors") for name in names):
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        hint = " (its pickled weights are not loaded, convert them)" if pickled else ""
        missing.append(f"weights as *.safetensors{hint}")
    if not missing:
        return
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    hint = f"; to serve a GGUF file, name it: {folder / ggufs[0]}" if ggufs else ""
    raise ModelError(f"{folder} has no {', no '.join(missing)}{hint}.", field="model")


def _fetch_from_hub(model: str, revision: str | None) -> Path:
    repo_id, _, file = model.partition(":")

    def fetch() -> Path:
        if file:
            return _fetch_file(repo_id, file, revision)
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*"],  # other formats of the same weights
        )
        if (Path(folder) / "modules.json").is_file():
            # How sentence-transformers pools stands in a folder of its own.
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=[_POOLING_FILE]
            )
        return Path(folder)

    path = _ask_hub(model, revision, fetch)
    _check_path(path, needs_weights=True)
    return path


def _ask_hub(model: str, revision: str | None, fetch: Callable[[], Path]) -> Path:
    """Return what `fetch` does; its errors become one line that says what is wrong."""
    # Takes 0.3 s to import, and local models do not need it.
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if logging.getLogger().handlers:
        # The library's own handler would print each line a second time.
        logging.getLogger("huggingface_hub").handlers.clear()
    try:
        return fetch()
    except GatedRepoError:
        reason = "its owner has to grant access; do so on its page and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private and needs HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except HFValidationError as error:
        reason = f"it is no valid id ({error})"
    except LocalEntryNotFoundError:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = "it is not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub"
        else:
            reason = "the hub can't be reached, and the model is not in the local cache"
    except (OSError, huggingface_hub.errors.EntryNotFoundError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    except Exception as error:  # its HTTP library's errors have no base that is ours to import
        reason = f"the hub can't be reached ({type(error).__name__})"
    raise ModelError(
        f"Model {model} is neither a local path nor to be had from the hub: {reason}.",
        field="model",
    )


def _fetch_file(repo_id: str, file: str, revision: str | None) -> Path:
    """Return one file of a hub repository, from the cache if the hub can't be reached."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # `hf_hub_download` asks a hub that is away again and again, for half a minute. This asks once.
    is_away = False
    url = huggingface_hub.hf_hub_url(repo_id, file, revision=revision)
    try:
        huggingface_hub.get_hf_file_metadata(url)
    except HfHubHTTPError as error:
        is_away = error.response.status_code >= 500
    except Exception:  # its HTTP library's errors have no base that is ours to import
        is_away = True
    return Path(
        huggingface_hub.hf_hub_download(repo_id, file, revision=revision, local_files_only=is_away)
    )
