"""Helpers of all tokenizers."""

import numpy as np

from data_pipeline.tokenizers import token_dtype


def test_the_token_type_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert token_dtype(2**16) == np.uint16
    assert token_dtype(2**16 + 1) == np.uint32
