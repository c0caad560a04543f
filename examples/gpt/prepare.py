"""Turn text files into the .bin and .idx files that Megatron trains on, one token a byte.

python examples/gpt/prepare.py --output data/stdlib                     # Python's own library
python examples/gpt/prepare.py --output data/books ~/books --suffix .txt
"""

import argparse
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from data import ByteTokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn text files into data for Megatron, one token a byte.")
    parser.add_argument("sources", nargs="*", help="files and folders; default: the library of this Python")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--suffix", help="which files of a folder; default .py for Python's library, else any"
    )
    parser.add_argument("--max-bytes", type=int, help="stop once this much text is in")
    args = parser.parse_args()
    if args.max_bytes is not None and args.max_bytes < 1:
        parser.error(f"--max-bytes {args.max_bytes} leaves nothing; give at least 1")
    suffix = args.suffix if args.suffix is not None else "" if args.sources else ".py"
    sources = args.sources or [sysconfig.get_paths()["stdlib"]]
    num_documents, num_bytes = write(args.output, documents(find_files(sources, suffix), args.max_bytes))
    print(f"{args.output}.bin: {num_documents} documents, {num_bytes} bytes of text")


def find_files(sources: Iterable[str], suffix: str) -> list[Path]:
    """Return the files meant by ``sources``, in an order that depends on nothing but their names."""
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.rglob(f"*{suffix}") if path.is_file())
            found += [path for path in inside if "site-packages" not in path.relative_to(source).parts]
        elif source.is_file():
            found.append(source)
        else:
            raise SystemExit(f"{source} is neither a file nor a folder")
    return found


def documents(paths: Iterable[Path], max_bytes: int | None) -> Iterator[bytes]:
    """Yield the text of each file that is not empty, cut off at ``max_bytes`` in all."""
    left = max_bytes
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise SystemExit(f"cannot read {path}: {error.strerror}") from None
        text = text if left is None else text[:left]
        if text:
            yield text
        if left is not None:
            left -= len(text)
            if left == 0:
                return


def write(prefix: str, texts: Iterable[bytes]) -> tuple[int, int]:
    """Write ``texts`` to ``prefix``; a reader sees all of it or nothing. Return the documents and bytes."""
    folder = Path(prefix).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    num_documents = num_bytes = 0
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder) as scratch:
        made = str(Path(scratch) / "data")
        builder = IndexedDatasetBuilder(get_bin_path(made), dtype=np.uint16)
        for text in texts:
            tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), ByteTokenizer.eod)
            builder.add_document(tokens, [len(tokens)])
            num_documents += 1
            num_bytes += len(text)
        if not num_documents:
            builder.data_file.close()
            raise SystemExit("no text found; name files or folders that hold some")
        builder.finalize(get_idx_path(made))
        Path(get_bin_path(made)).replace(get_bin_path(prefix))
        Path(get_idx_path(made)).replace(get_idx_path(prefix))  # last: the index is what a reader looks for
    return num_documents, num_bytes


if __name__ == "__main__":
    main()
