"""examples/gpt/prepare.py: text in, Megatron's files out."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PREPARE = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "prepare.py"
EOD = 256


@pytest.fixture
def prepare(monkeypatch, capsys):
    """Run the script here: a process of its own takes seconds, nearly all of them to import Megatron."""
    monkeypatch.syspath_prepend(PREPARE.parent)

    def run(*arguments):
        words = [sys.executable, str(PREPARE), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.delitem(sys.modules, "data", raising=False)
        code, message = 0, ""
        try:
            runpy.run_path(str(PREPARE), run_name="__main__")
        except SystemExit as end:
            code, message = (end.code, "") if isinstance(end.code, int) else (1, str(end.code or ""))
        told = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, told.out, told.err + message)

    yield run
    sys.modules.pop("data", None)


def documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [np.array(dataset[index]) for index in range(len(dataset))]


def error_of(done):
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_bytes("naïve\n".encode())
    (folder / "a.txt").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "c.md").write_bytes(b"not this one")
    return folder


def test_every_byte_comes_back_in_the_order_of_names(tmp_path, texts, prepare):
    prefix = tmp_path / "out" / "corpus"
    done = prepare(texts, "--suffix", ".txt", "--output", prefix)
    assert done.returncode == 0, done.stderr
    first, second = documents(prefix)
    assert first.dtype == np.uint16
    assert first[-1] == second[-1] == EOD
    assert bytes(first[:-1].astype(np.uint8)) == bytes(range(256))
    assert bytes(second[:-1].astype(np.uint8)).decode() == "naïve\n"
    assert "2 documents, 263 bytes" in done.stdout


def test_the_same_text_gives_the_same_files(tmp_path, texts, prepare):
    for name in ("one", "two"):
        assert prepare(texts, "--output", tmp_path / name).returncode == 0
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"two{ending}").read_bytes()


def test_max_bytes_cuts_the_text_off(tmp_path, texts, prepare):
    assert prepare(texts, "--max-bytes", 10, "--output", tmp_path / "cut").returncode == 0
    (only,) = documents(tmp_path / "cut")
    assert only.tolist() == [*range(10), EOD]


def test_default_is_pythons_own_library(tmp_path, prepare):
    assert prepare("--max-bytes", 1000, "--output", tmp_path / "stdlib").returncode == 0
    assert sum(len(document) - 1 for document in documents(tmp_path / "stdlib")) == 1000


def test_a_failure_leaves_what_was_there(tmp_path, texts, prepare):
    prefix = tmp_path / "out" / "corpus"
    assert prepare(texts, "--output", prefix).returncode == 0
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    empty = tmp_path / "nothing"
    empty.mkdir()
    assert error_of(prepare(empty, "--output", prefix)) == "no text found; name files or folders that hold some"
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_errors_are_one_sentence(tmp_path, prepare):
    missing = tmp_path / "missing"
    words = [sys.executable, PREPARE, missing, "--output", tmp_path / "x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert error_of(done) == f"{missing} is neither a file nor a folder"
    assert "--max-bytes 0 leaves nothing" in error_of(prepare("--max-bytes", 0, "--output", tmp_path / "x"))
    assert not list(tmp_path.iterdir())
