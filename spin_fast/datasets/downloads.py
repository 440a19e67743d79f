"""Downloads of data sets from their official sites, verified by checksums.

Neither site publishes checksums. ``SHA256SUMS`` beside this module lists those that are known all the same: of files in
the zips of TU sets and of OGB's molhiv that independent copies agree on, and of ``pcba.zip`` as TensorFlow Datasets has
it. Those of other sets are kept beside them, in a form that ``sha256sum -c`` reads: see ``registry.download``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO

from .._common import files
from .._common.check import Argument
from .._common.progress import download_bar
from . import ogb, tu
from .common import DatasetError, one_line, reading

TU_URL = "https://www.chrsmrrs.com/graphkerneldatasets"
OGB_URL = "https://snap.stanford.edu/ogb/data/graphproppred/csv_mol_download"
TU_NAMES = "https://chrsmrrs.github.io/datasets/docs/datasets/"
KNOWN = Path(__file__).with_name("SHA256SUMS")

_TU_NAME = re.compile(r"[A-Za-z0-9][\w.+()-]*")
# What is unpacked of an OGB zip, below its one folder; nothing here can point elsewhere.
_OGB_FILE = re.compile(r"((raw|mapping|split/scaffold)/[A-Za-z0-9][\w.-]*)|RELEASE_v\d+\.txt")
_TIMEOUT = 30  # seconds without an answer or a byte


def cache() -> Path:
    """The folder for downloads: ``$SPIN_FAST_CACHE``, or else the system's place for caches."""
    if chosen := os.environ.get("SPIN_FAST_CACHE"):
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("spin_fast"))


def download(name: str, root: Path, *, url: str | None = None, verify: bool = True, progress: bool = True) -> Path:
    """Get a set that is not under ``root`` yet: ``NAME.zip`` as it is, a set of OGB unpacked to ``ogbg_molhiv/``.

    Everything happens in a temporary folder under ``root``, up to one renaming; those of killed downloads are removed.
    """
    ogb.official(name)
    if ogb.owns(name):
        file, target = f"{ogb.download_name(name)}.zip", root / name.replace("-", "_")
        base = url or os.environ.get("SPIN_FAST_OGB_URL") or OGB_URL
    elif _TU_NAME.fullmatch(name):
        file, target = f"{name}.zip", root / f"{name}.zip"
        base = url or os.environ.get("SPIN_FAST_TU_URL") or TU_URL
    else:
        raise DatasetError(f"{name!r} is no name of a data set; names are as in {TU_NAMES} or ogbg-molhiv")
    source = f"{base.rstrip('/')}/{file}"
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(files.temporary_folder(target))
        except OSError as error:
            raise DatasetError(f"{error}; choose another root") from error
        archive = folder / file
        _fetch(source, archive, name, target, progress)
        _check_zip(archive, source)
        if ogb.owns(name):
            got = folder / target.name
            _unpack(archive, got, source)
            contents = sorted(path for path in got.rglob("*") if path.is_file())
            recorded = {path.relative_to(folder).as_posix(): _sha256(path) for path in contents}
            digests = {file: _sha256(archive)} | recorded
        else:
            got, digests = archive, _members(archive, name, source)
            recorded = {file: _sha256(archive)}
        if verify:
            why = "the one known to this package; datasets.download(..., verify=False) takes it all the same"
            _compare(digests, KNOWN, source, why)
        record = _record(target)
        if record.is_file():
            why = f"the one in {record}, of an earlier download; delete that file if the new one is right"
            _compare(recorded, record, source, why)
        try:
            got.rename(target)
        except OSError as error:
            if not target.exists():
                raise DatasetError(f"{target} cannot be written: {error.strerror or error}") from error
            return target  # another process was faster
    if not record.is_file():
        with files.replacing(record) as part:
            part.write_text("".join(f"{digest}  {path}\n" for path, digest in recorded.items()))
    return target


def check(path: Path) -> None:
    """Compare a downloaded zip or folder with the checksums that were written beside it, if they were."""
    record = _record(path)
    if not record.is_file():
        return
    for file, digest in _read(record).items():
        here = path.parent / file
        with reading(str(here)):
            same = _sha256(here) == digest
        if not same:
            raise DatasetError(
                f"{here} is not what was downloaded: its SHA-256 is not the one in {record}; "
                f"delete {path} and download it again, or delete {record} if the change is meant"
            )


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _read(sums: Path) -> dict[str, str]:
    """Checksums by file from lines such as ``sha256sum`` writes."""
    with reading(str(sums)):
        pairs = [line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {file.strip(): digest for digest, file in pairs}


def _compare(got: dict[str, str], sums: Path, source: str, why: str) -> None:
    wanted = _read(sums)
    for file, digest in got.items():
        if digest != wanted.get(file, digest):
            raise DatasetError(
                f"{source} is not the file it should be: the SHA-256 of {file} is {digest[:12]}..., not {why}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _digest(file)


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _fetch(source: str, to: Path, name: str, target: Path, progress: bool) -> None:
    """Download with pooch; errors become a DatasetError of one line."""
    import pooch
    import requests

    try:
        with download_bar(name, progress) as bar:
            pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=_TIMEOUT)(source, str(to), None)
    except requests.HTTPError as error:
        status = one_line(error).partition(" for url")[0]
        if error.response is not None and error.response.status_code == 404:
            names = "ogbg-molhiv and its kin" if ogb.owns(name) else f"as in {TU_NAMES}, case included"
            raise DatasetError(f"there is no data set {name!r} at {source} ({status}); names are {names}") from error
        raise DatasetError(f"{source} cannot be downloaded: the site answers {status}; try again later") from error
    except requests.Timeout as error:
        raise DatasetError(f"{source} cannot be downloaded: no answer for {_TIMEOUT} s; try again later") from error
    except requests.exceptions.ChunkedEncodingError as error:
        raise DatasetError(f"{source} cannot be downloaded: the connection broke off; try again") from error
    except requests.ConnectionError as error:
        kind = "" if type(error) is requests.ConnectionError else f" ({type(error).__name__})"
        raise DatasetError(
            f"{source} cannot be downloaded: no connection{kind}; go online, name a mirror by ",
            Argument("url"),
            f", or {'unpack it' if ogb.owns(name) else 'put it'} by hand as {target}",
        ) from error
    except requests.RequestException as error:
        raise DatasetError(f"{source} cannot be downloaded: {one_line(error)}") from error
    except OSError as error:
        raise DatasetError(f"{target.parent} cannot be written: {error.strerror or error}") from error


def _check_zip(archive: Path, source: str) -> None:
    """Refuse a file that is no zip, such as a login page, or a damaged one."""
    size = archive.stat().st_size
    if not zipfile.is_zipfile(archive):
        with archive.open("rb") as file:
            head = file.read(24)
        page = head.lstrip().lower().startswith((b"<!doctype", b"<html"))
        what = "a web page" if page else f"{size} bytes that begin with {head!r}"
        raise DatasetError(f"{source} is no zip file, or not a whole one, but {what}; try again, or another url")
    with reading(source), zipfile.ZipFile(archive) as file:
        if (damaged := file.testzip()) is not None:
            raise DatasetError(f"{source} is damaged: the checksum of {damaged} in it is wrong; try again")


def _members(archive: Path, name: str, source: str) -> dict[str, str]:
    """Checksums of the text files of a TU set."""
    text = tu.Files(archive, name)
    if not text.has("A"):
        raise DatasetError(f"{source} holds no {name}_A.txt (it holds {text.some()}): no set in TU text layout")
    digests = {}
    for part in filter(text.has, tu.PARTS):
        with text.open(part) as member:
            digests[f"{name}/{name}_{part}.txt"] = _digest(member)
    return digests


def _unpack(archive: Path, folder: Path, source: str) -> None:
    """Unpack a zip of OGB's into ``folder``, file by file: paths that lead elsewhere are never used."""
    with reading(source), zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            path = "/".join(PurePosixPath(member.filename).parts[1:])
            if member.is_dir() or not _OGB_FILE.fullmatch(path):
                continue
            if (folder / path).exists():
                raise DatasetError(f"{source} holds {path} twice")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with file.open(member) as packed, (folder / path).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    for path in ogb.FILES:
        if not (folder / path).is_file():
            raise DatasetError(f"{source} holds no {path}: no set of OGB's molecules")
