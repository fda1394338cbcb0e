"""Writes what pretrain_t5.py reads: `data.bin`, `data.idx` and `vocab.txt` of random words."""

import sys
from pathlib import Path

import numpy
import torch

from megatron_autorecompute.meta import without_cuda

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS, DOCUMENTS, SENTENCES, WORDS_A_SENTENCE = 90, 200, 4, 12


def main(folder: Path) -> None:
    without_cuda.activate()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=numpy.int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DOCUMENTS):
        for _ in range(SENTENCES):
            shape = (WORDS_A_SENTENCE,)
            builder.add_item(torch.randint(len(SPECIAL), len(words), shape, generator=generator))
        builder.end_document()
    builder.finalize(str(folder / "data.idx"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
