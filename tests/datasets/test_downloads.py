"""Downloads from a server of the tests' own: what arrives, what is checked, what is left behind when it goes wrong."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spin_fast import datasets
from spin_fast.datasets import DatasetError, downloads

TU = {
    "A": "1, 2\n2, 1\n",
    "graph_indicator": "1\n1\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "0\n1\n0\n",
}
OGB = {
    "raw/num-node-list": "2\n1\n",
    "raw/num-edge-list": "1\n0\n",
    "raw/edge": "0,1\n",
    "raw/node-feat": "5,0\n6,1\n7,0\n",
    "raw/edge-feat": "0\n",
    "raw/graph-label": "1\n0\n",
    "split/scaffold/train": "1\n",
    "split/scaffold/valid": "0\n",
    "split/scaffold/test": "\n",
}


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tu_zip(name: str = "TINY", **changes: str) -> bytes:
    return packed({f"{name}/{name}_{part}.txt": text.encode() for part, text in (TU | changes).items()})


def ogb_zip(**more: bytes) -> bytes:
    files = {f"hiv/{file}.csv.gz": gzip.compress(text.encode(), mtime=0) for file, text in OGB.items()}
    return packed(files | {"hiv/RELEASE_v1.txt": b"v1", "hiv/raw/": b""} | more)


class Site:
    """What a server answers by path: bytes, a status, or a function of the handler; and how often it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        self.asked: list[str] = []
        self.url = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    here = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.asked.append(self.path)
            answer = here.answers.get(self.path, 404)
            if callable(answer):
                answer(self)
            elif isinstance(answer, int):
                self.send_error(answer)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        here.url = f"http://127.0.0.1:{server.server_port}"
        for name in ("SPIN_FAST_TU_URL", "SPIN_FAST_OGB_URL"):
            monkeypatch.setenv(name, here.url)
        monkeypatch.setenv("SPIN_FAST_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("SPIN_FAST_DATA", raising=False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        yield here
        server.shutdown()
        thread.join()


def error_of(name: str, root: Path, **options: object) -> str:
    """The one line of the error; nothing may be left in ``root`` but what was there before."""
    before = sorted(root.rglob("*"))
    with pytest.raises(DatasetError) as caught:
        datasets.download(name, root, **options)
    assert sorted(root.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 500
    return message


def test_a_tu_set_is_kept_as_it_is(site: Site, tmp_path: Path) -> None:
    content = site.answers["/TINY.zip"] = tu_zip()
    path = datasets.download("TINY", tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "TINY.zip"
    assert path.read_bytes() == content
    assert sorted(file.name for file in path.parent.iterdir()) == ["TINY.zip", "TINY.zip.sha256"]
    subprocess.run(["sha256sum", "-c", "TINY.zip.sha256"], cwd=path.parent, check=True, capture_output=True)
    assert datasets.download("TINY", path.parent) == path
    assert site.asked == ["/TINY.zip"]
    assert len(datasets.load("TINY", path.parent)) == 2


def test_a_set_of_ogb_is_unpacked(site: Site, tmp_path: Path) -> None:
    site.answers["/hiv.zip"] = ogb_zip()
    path = datasets.download("ogbg-molhiv", tmp_path, verify=False)
    assert path == tmp_path / "ogbg_molhiv"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ogbg_molhiv", "ogbg_molhiv.sha256"]
    subprocess.run(["sha256sum", "-c", "ogbg_molhiv.sha256"], cwd=tmp_path, check=True, capture_output=True)
    assert (path / "RELEASE_v1.txt").read_text() == "v1"  # OGB's own loader looks for it
    graphs = datasets.load("ogbg-molhiv", tmp_path, download=True)
    assert graphs.x.tolist() == [[5, 0], [6, 1], [7, 0]]
    assert site.asked == ["/hiv.zip"]


def test_loading_downloads_into_the_cache_only_when_asked(site: Site, tmp_path: Path) -> None:
    site.answers["/TINY.zip"] = tu_zip()
    with pytest.raises(DatasetError, match="download=True"):
        datasets.load("TINY")
    assert site.asked == []
    graphs = datasets.load("TINY", download=True)
    assert torch.equal(graphs.x, datasets.load("TINY").x)
    assert "TINY" in datasets.names()
    assert (tmp_path / "cache" / "TINY.zip").is_file()
    assert site.asked == ["/TINY.zip"]
    assert "TINY" not in datasets.names(tmp_path / "elsewhere")


def test_the_chosen_folder_goes_before_the_cache(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.answers["/TINY.zip"] = tu_zip()
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path / "mine"))
    assert datasets.download("TINY") == tmp_path / "mine" / "TINY.zip"
    monkeypatch.delenv("SPIN_FAST_DATA")
    assert datasets.download("TINY") == tmp_path / "cache" / "TINY.zip"


def test_the_cache_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPIN_FAST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert downloads.cache().name == "spin_fast"


def test_a_mirror_is_named_by_url(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIN_FAST_TU_URL", "http://127.0.0.1:9")
    site.answers["/mirror/TINY.zip"] = tu_zip()
    assert datasets.download("TINY", tmp_path, url=f"{site.url}/mirror/").is_file()


def test_progress_is_shown_on_a_terminal(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.answers["/TINY.zip"] = tu_zip(node_labels="0\n1\n0\n" + " " * 300_000)
    monkeypatch.setenv("COLUMNS", "100")
    datasets.download("TINY", tmp_path / "silent", progress=False)
    datasets.download("TINY", tmp_path / "no terminal")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    datasets.download("TINY", tmp_path / "shown")
    out, shown = capsys.readouterr()
    assert out == ""
    assert "TINY" in shown
    assert "bytes" in shown or "kB" in shown


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (404, ["no data set 'TINY'", "404", "chrsmrrs.github.io"]),
        (503, ["503", "try again later"]),
        (b"<!DOCTYPE html><title>log in</title>", ["a web page"]),
        (tu_zip()[:-30], ["no zip file, or not a whole one"]),
        (b"", ["no zip file", "0 bytes"]),
        (tu_zip("OTHER"), ["holds no TINY_A.txt", "OTHER_A.txt"]),
    ],
)
def test_a_wrong_answer_leaves_nothing(site: Site, tmp_path: Path, answer: object, words: list[str]) -> None:
    site.answers["/TINY.zip"] = answer
    message = error_of("TINY", tmp_path)
    assert all(word in message for word in [*words, f"{site.url}/TINY.zip"])


def test_a_damaged_zip(site: Site, tmp_path: Path) -> None:
    whole = packed({f"TINY/TINY_{part}.txt": text.encode() for part, text in TU.items()})
    at = whole.index(b"TINY_A.txt") + len(b"TINY_A.txt") + 2
    site.answers["/TINY.zip"] = whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
    assert f"{site.url}/TINY.zip" in error_of("TINY", tmp_path)


@pytest.mark.parametrize("announced", [True, False])
def test_a_connection_that_breaks_off(site: Site, tmp_path: Path, announced: bool) -> None:
    def half(handler: http.server.BaseHTTPRequestHandler) -> None:
        whole = tu_zip()
        handler.send_response(200)
        if announced:
            handler.send_header("Content-Length", str(len(whole)))
        handler.end_headers()
        handler.wfile.write(whole[: len(whole) // 2])

    site.answers["/TINY.zip"] = half
    message = error_of("TINY", tmp_path)
    assert ("broke off" if announced else "not a whole one") in message


def test_no_connection_and_no_answer(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of("TINY", tmp_path, url="http://127.0.0.1:9")
    assert "no connection" in message
    assert str(tmp_path) in message
    monkeypatch.setattr(downloads, "_TIMEOUT", 0.05)
    release = threading.Event()
    site.answers["/TINY.zip"] = lambda _: release.wait(5)
    assert "no answer" in error_of("TINY", tmp_path)
    release.set()
    assert "cannot be downloaded" in error_of("TINY", tmp_path, url="nowhere")


def test_an_interruption_leaves_nothing(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    site.answers["/TINY.zip"] = tu_zip()
    monkeypatch.setattr(downloads, "_check_zip", interrupt)
    with pytest.raises(KeyboardInterrupt):
        datasets.download("TINY", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_download_left_is_removed(site: Site, tmp_path: Path) -> None:
    site.answers["/TINY.zip"] = tu_zip()
    (tmp_path / "TINY.zip.0123abcd.part").mkdir()
    (tmp_path / "TINY.zip.0123abcd.part" / "TINY.zip").write_text("half of it")
    datasets.download("TINY", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["TINY.zip", "TINY.zip.sha256"]


def test_another_process_that_was_faster(site: Site, tmp_path: Path) -> None:
    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        (tmp_path / "ogbg_molhiv" / "raw").mkdir(parents=True)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(ogb_zip())

    site.answers["/hiv.zip"] = slow
    assert datasets.download("ogbg-molhiv", tmp_path, verify=False) == tmp_path / "ogbg_molhiv"
    assert [path.name for path in tmp_path.iterdir()] == ["ogbg_molhiv"]


def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot be written"):
        datasets.download("TINY", tmp_path / "file" / "folder")


def test_known_checksums(site: Site, tmp_path: Path) -> None:
    site.answers["/NCI1.zip"] = tu_zip("NCI1")
    message = error_of("NCI1", tmp_path)
    assert "SHA-256 of NCI1/NCI1_A.txt" in message
    assert "verify=False" in message
    site.answers["/hiv.zip"] = ogb_zip()
    assert "SHA-256 of ogbg_molhiv/raw/" in error_of("ogbg-molhiv", tmp_path)
    site.answers["/pcba.zip"] = ogb_zip()
    assert "SHA-256 of pcba.zip" in error_of("ogbg-molpcba", tmp_path)
    assert datasets.download("NCI1", tmp_path, verify=False).is_file()


def test_known_checksums_are_those_of_the_public_files(data_root: Path) -> None:
    known = downloads._read(downloads.KNOWN)
    assert all(len(digest) == 64 for digest in known.values())
    for path in sorted(data_root.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for member in known.keys() & archive.namelist():
                assert known[member] == hashlib.sha256(archive.read(member)).hexdigest()
    for file in ("raw/edge.csv.gz", "raw/graph-label.csv.gz", "split/scaffold/train.csv.gz"):
        if (data_root / "ogbg_molhiv" / file).is_file():
            digest = hashlib.sha256((data_root / "ogbg_molhiv" / file).read_bytes()).hexdigest()
            assert known[f"ogbg_molhiv/{file}"] == digest


def test_a_public_zip_passes(site: Site, tmp_path: Path, data_root: Path) -> None:
    if not (data_root / "ENZYMES.zip").is_file():
        pytest.skip(f"no ENZYMES.zip in {data_root}")
    site.answers["/ENZYMES.zip"] = (data_root / "ENZYMES.zip").read_bytes()
    assert len(datasets.load("ENZYMES", tmp_path, download=True)) == 600


def test_the_first_download_is_trusted_and_the_next_compared(site: Site, tmp_path: Path) -> None:
    site.answers["/TINY.zip"] = tu_zip()
    path = datasets.download("TINY", tmp_path)
    path.unlink()
    site.answers["/TINY.zip"] = tu_zip(graph_labels="1\n2\n")
    message = error_of("TINY", tmp_path)
    assert "TINY.zip.sha256" in message
    site.answers["/TINY.zip"] = tu_zip()
    assert datasets.download("TINY", tmp_path) == path


def test_a_file_that_changed_on_disk(site: Site, tmp_path: Path) -> None:
    site.answers |= {"/TINY.zip": tu_zip(), "/hiv.zip": ogb_zip()}
    for name, file in (("TINY", "TINY.zip"), ("ogbg-molhiv", "ogbg_molhiv/raw/edge.csv.gz")):
        datasets.download(name, tmp_path, verify=False)
        datasets.load(name, tmp_path)
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content + b"\n")
        with pytest.raises(DatasetError, match=f"{file} is not what was downloaded"):
            datasets.load(name, tmp_path)
        (tmp_path / file).write_bytes(content)
        datasets.load(name, tmp_path)


def test_paths_that_lead_out_of_the_folder_are_not_followed(site: Site, tmp_path: Path) -> None:
    evil = {name: b"evil" for name in ("hiv/../../evil.txt", "/evil.txt", "hiv/raw/../../evil.txt", "hiv/raw/.evil")}
    site.answers["/hiv.zip"] = ogb_zip(**evil)
    root = tmp_path / "in" / "here"
    datasets.download("ogbg-molhiv", root, verify=False)
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert not any("evil" in name for name in names)
    site.answers["/hiv.zip"] = packed({"hiv/readme.txt": b"no data"})
    assert "holds no raw/num-node-list.csv.gz" in error_of("ogbg-molhiv", tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../TINY", "no name of a data set"),
        ("TINY?x=1", "no name of a data set"),
        ("digits", "built in"),
        ("CSL", "built in"),
        ("ogbg-molesol", "a regression set"),
        ("ogbg-ppa", "another layout"),
        ("ogbn-arxiv", "a set for classifying nodes, which is not read"),
        ("ogbg-molnone", "no classification set"),
    ],
)
def test_names_that_no_site_has(site: Site, tmp_path: Path, name: str, words: str) -> None:
    assert words in error_of(name, tmp_path)
    assert site.asked == []


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="download must be a bool"):
        datasets.load("TINY", tmp_path, download=1)
    with pytest.raises(TypeError, match="verify must be a bool"):
        datasets.download("TINY", tmp_path, verify="no")
