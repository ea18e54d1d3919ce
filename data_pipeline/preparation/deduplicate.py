"""Deduplication: of the documents with the same text, keep the first in input order.

A held-out split that the input gives stays whole; train loses the documents that are in one.
"""

import numpy as np

from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.readers.names import TRAIN


def first_of_each_text(index: InputIndex) -> np.ndarray:
    """Numbers of the documents to keep, ascending. Sets `index.duplicates` to the others' count.

    Texts are equal if the first 16 bytes of their sha256 are equal. Sorting these needs no hash
    table of Python objects, so memory stays at a few words per document.
    """
    words = np.ascontiguousarray(index.text_hash).view("<u8")  # [D, 2]
    is_held_out = np.array([file.split not in ("", TRAIN) for file in index.files])[index.file]
    # The sort is stable: equal texts stay in input order, those of held-out splits before train.
    order = np.lexsort((~is_held_out, words[:, 1], words[:, 0]))
    is_repeat = np.zeros(len(order), bool)
    is_repeat[1:] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    is_repeat &= ~is_held_out[order]
    first = np.sort(order[~is_repeat])
    index.duplicates = len(index) - len(first)
    return first
