from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spin_fast._common import files

FORMAT = "spin_fast things 2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "things.safetensors"
    files.write_tensors(path, FORMAT, {"a": torch.arange(9), "b": torch.ones(2, 3)}, {"colour": "red"})
    return path


def test_round_trip(path: Path) -> None:
    for mmap in (True, False):
        tensors, metadata = files.read_tensors(path, FORMAT, mmap=mmap)
        assert metadata == {"format": FORMAT, "colour": "red"}
        assert torch.equal(tensors["a"], torch.arange(9))
        assert torch.equal(tensors["b"], torch.ones(2, 3))
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_what_the_umask_allows(path: Path) -> None:
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_what_is_written_to_a_mapped_tensor_stays_out_of_the_file(path: Path) -> None:
    files.read_tensors(path, FORMAT, mmap=True)[0]["a"].zero_()
    assert torch.equal(files.read_tensors(path, FORMAT)[0]["a"], torch.arange(9))


@pytest.mark.parametrize("size", [0, 3, 8, 9, 60, -49, -8, -1])
def test_files_cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{path} is not a readable safetensors file: "):
        files.read_tensors(path, FORMAT)


def test_files_of_others(path: Path) -> None:
    path.write_text("Dear diary,\n" * 20)
    with pytest.raises(ValueError, match=rf"{path} is not a readable safetensors file: "):
        files.read_tensors(path, FORMAT)
    for metadata, found in ((None, "None"), ({"format": "pt"}, "'pt'"), ({"format": "spin_fast thing 9"}, "thing 9")):
        save_file({"a": torch.ones(1)}, path, metadata)
        with pytest.raises(ValueError, match=rf"{path} is no file of spin_fast things: its format is .*{found}"):
            files.read_tensors(path, FORMAT)


def test_newer_formats_ask_for_an_upgrade(path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{path} has format '{FORMAT}', and this version reads .* 1'; upgrade"):
        files.read_tensors(path, "spin_fast things 1")
    with pytest.raises(ValueError, match=rf"{path} has format '{FORMAT}', .* 3'; an older one wrote it"):
        files.read_tensors(path, "spin_fast things 3")


def test_older_formats_that_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "things.json"
    files.write_json(path, "spin_fast things 2", {})
    assert files.read_json(path, "spin_fast things 4", oldest=2) == {"format": "spin_fast things 2"}
    for oldest in (None, 3):
        with pytest.raises(ValueError, match=r"has format 'spin_fast things 2', .*; an older one wrote it"):
            files.read_json(path, "spin_fast things 4", oldest=oldest)
    with pytest.raises(ValueError, match="upgrade spin_fast"):
        files.read_json(path, "spin_fast things 1", oldest=1)


def test_what_is_no_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"things .*nosuch does not exist"):
        files.read_tensors(path.parent / "nosuch", FORMAT)
    with pytest.raises(FileNotFoundError, match=r"things .*deep is a folder"):
        files.read_tensors(path.parent, FORMAT)
    with pytest.raises(FileNotFoundError, match="nosuch does not exist"):
        files.read_json(path.parent / "nosuch", FORMAT)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "things.json"
    files.write_json(path, FORMAT, {"a": [1, 2]})
    assert files.read_json(path, FORMAT) == {"format": FORMAT, "a": [1, 2]}
    for text, message in (
        ("{", "is not a JSON file"),
        ("[3]", "is no file of"),
        (b"\xff\xfe\xff", "is not a JSON file"),
    ):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=message):
            files.read_json(path, FORMAT)


def test_what_fails_leaves_what_was_there(path: Path) -> None:
    def interrupted() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(OSError, match=rf"{path} cannot be written: the disk is full"), files.replacing(path):
        raise OSError("the disk is full")
    assert list(path.parent.iterdir()) == [path]
    assert files.read_tensors(path, FORMAT)[1]["colour"] == "red"


def test_places_that_cannot_be_written(path: Path) -> None:
    for place, reason in ((path.parent, "it is a folder"), (path / "below", "Not a directory|File exists")):
        with pytest.raises(OSError, match=rf"{place} cannot be written: ({reason})"):
            files.check_writable(place)
    with pytest.raises(OSError, match=rf"{path / 'below'} cannot be written"):
        files.write_tensors(path / "below", FORMAT, {}, {})
    with pytest.raises(OSError, match=r"/proc/nosuch/x cannot be written"):
        files.write_tensors(Path("/proc/nosuch/x"), FORMAT, {}, {})
    files.check_writable(path)
    files.check_writable(path.parent / "new" / "below" / "x")
    assert list(path.parent.iterdir()) == [path]


def test_tensors_that_others_wrote_unaligned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    content = {"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}, "__metadata__": {"format": FORMAT}}
    header = json.dumps(content).encode()
    header += b" " * (-len(header) % 8 + 3)
    path.write_bytes(struct.pack("<Q", len(header)) + header + torch.tensor([7, 8]).numpy().tobytes())
    (tensor,) = files.read_tensors(path, FORMAT, mmap=True)[0].values()
    assert tensor.tolist() == [7, 8]
    assert tensor.data_ptr() % 8 == 0


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with files.replacing(path) as one, files.replacing(path) as other:
        one.write_text("1")
        other.write_text("2")
    assert path.read_text() == "1"
    assert list(tmp_path.iterdir()) == [path]


HOLDER = """
import os, sys
from pathlib import Path
from spin_fast._common import files
with files.locked(Path("run")), files.replacing(Path("x")) as temporary:
    temporary.write_text("half of it")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_lock_tells_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    """So do temporary files: the next writer removes them."""
    folder, path = tmp_path / "run", tmp_path / "x"
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        said = rf"{folder} is being written by process {holder.pid} on {socket.gethostname()} since \d{{4}}-.*; wait"
        with pytest.raises(BlockingIOError, match=said), files.locked(folder):
            pass
        with files.replacing(path) as temporary:
            temporary.write_text("whole")
        assert len(list(tmp_path.glob("x.*.part/x"))) == 1
        holder.kill()
    with files.locked(folder), files.replacing(path) as temporary:
        temporary.write_text("whole")
    assert sorted(tmp_path.iterdir()) == [folder, path]
    assert list(folder.iterdir()) == []
    with files.locked(tmp_path / "deep" / "new"):
        assert (tmp_path / "deep" / "new" / ".lock").is_file()
    assert not (tmp_path / "deep").exists()


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    both = torch.arange(6)
    files.write_tensors(tmp_path / "x", FORMAT, {"a": both.view(2, 3), "b": both, "c": both[2:], "d": both[:0]}, {})
    found = files.read_tensors(tmp_path / "x", FORMAT)[0]
    assert {name: value.flatten().tolist() for name, value in found.items()} == {
        "a": [*range(6)],
        "b": [*range(6)],
        "c": [2, 3, 4, 5],
        "d": [],
    }


def test_a_name_that_is_too_long_is_told_beforehand(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be written: File name too long"):
        files.check_writable(tmp_path / ("x" * 250))


def test_a_file_that_is_replaced_while_it_is_opened_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    opened = safetensors.safe_open

    def replaced_meanwhile(*arguments, **options):
        file = opened(*arguments, **options)
        if file.metadata()["colour"] == "red":
            files.write_tensors(path, FORMAT, {"a": torch.ones(1)}, {"colour": "blue"})
        return file

    monkeypatch.setattr(safetensors, "safe_open", replaced_meanwhile)
    tensors, metadata = files.read_tensors(path, FORMAT)
    assert metadata["colour"] == "blue"
    assert tensors["a"].tolist() == [1]
