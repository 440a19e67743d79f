"""Files that this package writes: whole or not at all, and of a format that is named in them.

Tensors are kept in safetensors files, whose metadata has under ``format`` what they are and the version of that, such
as ``spin_fast features 2``.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor


def json_or_text(text: str | None) -> Any:
    """What a text means as JSON; itself if that is nothing, since a user may write any text into a file."""
    with suppress(TypeError, ValueError):
        return json.loads(text or "")
    return text


@contextmanager
def locked(place: Path, *, is_file: bool = False) -> Iterator[None]:
    """Keep other processes that lock it out of a folder, or off one file in it.

    The folder is made if need be, and then removed if it stays empty. The lock of a process that has been killed is
    free. Who only reads needs none.

    Raises:
        BlockingIOError: another process has it; says which, and since when.
    """
    from filelock import FileLock, Timeout

    folder, of = (place.parent, f".{place.name}") if is_file else (place, "")
    made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file, told = folder / f"{of}.lock", folder / f"{of}.locked-by"  # two, since filelock may empty its own
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = ""
        with suppress(OSError):
            holder = told.read_text()
        holder = holder or "another process"
        raise BlockingIOError(f"{place} is being written by {holder}; wait for it, or choose another") from None
    try:
        with _errors_named(place):
            told.write_text(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}")
        yield
    finally:
        for mine in (told, file):
            mine.unlink(missing_ok=True)
        lock.release()
        for empty in made:
            with suppress(OSError):
                empty.rmdir()


def temporary_name(path: Path, tag: str) -> Path:
    return path.with_name(f"{path.name}.{tag}.part")


def shard_path(path: Path, number: int, of: int, tag: str = "") -> Path:
    """``NAME-00003-of-00016.parquet``: the third of 16 files that together are ``NAME.parquet``.

    With a ``tag`` ``NAME~TAG-00003-of-00016.parquet``, which no name of a user's is likely to be.
    """
    return path.with_name(f"{path.stem}{tag and f'~{tag}'}-{number:05}-of-{of:05}{path.suffix}")


def shards_beside(path: Path) -> list[tuple[Path, int, int]]:
    """The files that are there under names of :func:`shard_path` without tag, each with its number and of how many."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{5,}})-of-(\d{{5,}}){re.escape(path.suffix)}")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    found = [(file, match) for file in there if (match := name.fullmatch(file.name))]
    return sorted((file, int(match[1]), int(match[2])) for file, match in found)


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of ``path`` have left beside it."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):  # of temporary_name
        with suppress(OSError), locked(leftover):
            shutil.rmtree(leftover)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path`` for what is to replace it; remove it, and those that killed writers left."""
    remove_leftovers(path)
    with ExitStack() as lock:
        with _errors_named(path):
            for last in (False, False, True):
                folder = temporary_name(path, uuid.uuid4().hex[:8])
                try:
                    lock.enter_context(locked(folder))
                    break
                except (BlockingIOError, FileExistsError, FileNotFoundError):  # taken for a leftover by another writer
                    if last:
                        raise
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # an error that is raised already counts


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to, renamed to ``path`` on success and removed on failure."""
    with _errors_named(path):
        _check_regular(path)
    with temporary_folder(path) as folder, _errors_named(path):
        yield (temporary := folder / path.name)
        temporary.replace(path)


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(path: Path, is_own: Callable[[Path], bool] | None = None) -> None:
    """Check, before any work, that a file or the first missing folder on the way to it can be created.

    Args:
        is_own: whether a file that is there may be replaced; None for any. An empty one always may.
    """
    with _errors_named(path):
        _check_regular(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary_name(path, "0" * 8).lstat()  # whose name must not be too long
        if is_own is not None and path.exists() and path.stat().st_size > 0 and not is_own(path) and path.exists():
            raise FileExistsError(0, "there is a file of another kind; remove it, or choose another name")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=folder).close()


def _check_regular(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    if path.exists() and not path.is_file():
        raise OSError(0, "it is no regular file")


def check_is_file(path: Path, format: str) -> None:
    if not path.is_file():
        kind = format.rsplit(" ", 1)[0].removeprefix("spin_fast ")
        raise FileNotFoundError(f"{kind} {path} {'is a folder' if path.is_dir() else 'does not exist'}")


def check_format(path: Path, found: Any, expected: str, *, oldest: int | None = None) -> None:
    """Raise a ValueError unless formats such as ``spin_fast features 2`` are the same; it tells a newer version.

    Args:
        oldest: an earlier version, from which on they are read as well.
    """
    kind, version = expected.rsplit(" ", 1)
    of, _, number = str(found).rpartition(" ")
    is_kind, newest = of == kind and number.isdecimal(), int(version)
    if is_kind and (newest if oldest is None else oldest) <= int(number) <= newest:
        return
    if is_kind:
        advice = "upgrade spin_fast" if int(number) > newest else "an older one wrote it"
        raise ValueError(f"{path} has format {found!r}, and this version reads {expected!r}; {advice}")
    raise ValueError(f"{path} is no file of {kind}: its format is {found!r}, not {expected!r}")


def write_tensors(path: Path, format: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a safetensors file, those that share memory as well."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            stored = {name: value.cpu().contiguous() for name, value in tensors.items()}
            places = {value.untyped_storage().data_ptr(): name for name, value in stored.items()}
            for name, value in stored.items():
                if places[value.untyped_storage().data_ptr()] != name:
                    stored[name] = value.clone()
            save_file(stored, temporary, {"format": format} | metadata)
            temporary.chmod(mode)  # safetensors leaves files that only their owner may read
        except SafetensorError as error:  # a full disk, among others
            raise OSError(str(error)) from error


def read_tensors(path: Path, format: str, *, mmap: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`write_tensors` has written: the tensors and the metadata.

    Args:
        mmap: tensors are private mappings of the file: a page is read when it is first used, and what is written to it
            never reaches the file.

    Raises:
        FileNotFoundError: no such file. ValueError: the file is cut short, something else, or of a newer format.
    """
    with _opened(path, format) as (file, metadata):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: value if mmap and _is_aligned(value) else value.clone() for name, value in tensors.items()}, metadata


def read_metadata(path: Path, format: str) -> dict[str, str]:
    """The metadata alone of what :func:`write_tensors` has written; errors as of :func:`read_tensors`."""
    with _opened(path, format) as (_, metadata):
        return metadata


@contextmanager
def _opened(path: Path, format: str) -> Iterator[tuple[Any, dict[str, str]]]:
    from safetensors import SafetensorError

    check_is_file(path, format)
    try:
        with _safe_open(path) as file:
            metadata = file.metadata() or {}
            check_format(path, metadata.get("format"), format)
            yield file, metadata
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def identity(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _safe_open(path: Path) -> Any:
    """Open a safetensors file, which safetensors does twice: again where it was replaced in between."""
    from safetensors import SafetensorError, safe_open

    while True:
        before = identity(path)
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, RuntimeError, OSError):
            if identity(path) == before:
                raise
            continue
        if identity(path) == before:
            return file


def _is_aligned(value: Tensor) -> bool:
    """Whether the address is a multiple of the element size, as kernels expect; safetensors does not promise it."""
    return value.data_ptr() % value.element_size() == 0


def has_format(path: Path, format: str) -> bool:
    """Whether there is a file of this format, in any version, by :func:`write_tensors` or :func:`write_json`."""
    from safetensors import SafetensorError

    try:
        if path.suffix == ".json":
            found = json.loads(path.read_bytes())["format"]
        else:
            with _safe_open(path) as file:
                found = (file.metadata() or {})["format"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False
    return str(found).rpartition(" ")[0] == format.rpartition(" ")[0]


def write_json(path: Path, format: str, content: dict[str, Any], *, indent: int | None = 2) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"format": format} | content, indent=indent) + "\n")


def read_json(path: Path, format: str, *, oldest: int | None = None) -> dict[str, Any]:
    """Read what :func:`write_json` has written, of versions as in :func:`check_format`.

    Raises:
        FileNotFoundError, ValueError: as of :func:`read_tensors`.
    """
    check_is_file(path, format)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    check_format(path, content.get("format") if isinstance(content, dict) else None, format, oldest=oldest)
    return content
