"""Text as bytes, through Megatron's own indexed files and GPTDataset.

A sample is named by its place in the training order, which no change of world alters.
"""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizerBase


class ByteTokenizer(MegatronTokenizerBase):
    """A token is a byte; two more end a document and fill a sequence up."""

    vocab_size = 258
    eod = 256
    pad = 257

    def __init__(self):
        super().__init__(path="", config={})
        self.unique_identifiers = OrderedDict(
            {"class": "ByteTokenizer"}
        )  # part of the name of a cached index

    def tokenize(self, text):
        return list(text.encode())

    def detokenize(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def vocab(self):
        return {bytes([value]): value for value in range(256)}

    def apply_chat_template(self):
        raise NotImplementedError("bytes have no chat template")


def open_datasets(prefix: str, seq_length: int, seed: int, num_train: int, num_valid: int):
    """Return the training and the validation set of ``prefix``, in an order that ``seed`` and the sizes fix.

    Megatron's builder uses barriers once a process group exists, so call this before joining a world: a
    standby can then open its data without anybody's help. A lock keeps two processes from building one index.
    """
    if not Path(prefix + ".idx").exists():
        raise SystemExit(
            f"no data at {prefix}.idx; make some with: python examples/gpt/prepare.py --output {prefix}"
        )
    cache = Path(prefix + ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split=_split(prefix),
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    with FileLock(cache / "lock"):
        builder = BlendedMegatronDatasetBuilder(GPTDataset, (num_train, num_valid, 0), lambda: True, config)
        train, valid, _ = builder.build()
    return train, valid


def _split(prefix: str) -> str:
    """Hold back 2 % of the documents, but one at least: over none at all Megatron counts epochs for ever."""
    num_documents = len(IndexedDataset(prefix))
    if num_documents < 2:
        raise SystemExit(f"{prefix}.bin holds {num_documents} documents; training and validation need two")
    percent = max(2, -(-100 // num_documents))
    return f"{100 - percent},{percent},0"


def sample_ids(first: int, micro_batch: int, micro_batch_size: int) -> range:
    """Where in the order this rank's ``micro_batch`` lies, if the global batch begins at ``first``.

    Whatever the data parallel size, a global batch is the same samples: only their split over ranks differs.
    """
    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    start = first + (micro_batch * dp + rank) * micro_batch_size
    return range(start, start + micro_batch_size)


def micro_batches(
    dataset, first: int, num_microbatches: int, micro_batch_size: int, device
) -> Iterator[dict]:
    """Yield this rank's part of the global batch that begins at sample ``first``."""
    for micro_batch in range(num_microbatches):
        samples = [dataset[index] for index in sample_ids(first, micro_batch, micro_batch_size)]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        yield {key: _slice_of_this_cp_rank(value).to(device) for key, value in batch.items()}


def _slice_of_this_cp_rank(value: torch.Tensor) -> torch.Tensor:
    """Cut the sequence into 2*cp pieces; a rank has one and its mirror, so that causal work is equal."""
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if cp == 1:
        return value
    pieces = value.chunk(2 * cp, dim=1)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim=1)
