"""The paper's experiments: their data, their evaluation, and the published result.

Source: Dai et al. 2019, arXiv:1901.02860, tables 1 to 4, and the settings of the published scripts.
The training settings of an experiment are in configs/paper/NAME.yaml.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from data_pipeline.tokenizers.recipes import RecipeName

Metric = Literal["perplexity", "bits_per_character"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The published files of a corpus, and how they become a dataset."""

    recipe: RecipeName
    tokenizer: Literal["byte", "char", "word"]
    files: Mapping[str, str]
    """Pattern per split, below the directory that the user gives. With fixed splits only train."""
    min_freq: int | None = None
    source: str
    """Where to get the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One row of the paper's tables."""

    corpus: Corpus
    metric: Metric
    published: float | None
    """On the test split; None: the paper has none."""
    table: str
    tgt_len: int
    mem_len: int
    clamp_len: int | None
    """The evaluation's lengths; same_length is always on."""


_WT103 = Corpus(
    recipe="wt103",
    tokenizer="word",
    files={
        "train": "wiki.train.tokens",
        "valid": "wiki.valid.tokens",
        "test": "wiki.test.tokens",
    },
    source="WikiText-103 (word level), Merity et al. 2016: wikitext-103-v1.zip",
)
_LM1B = Corpus(
    recipe="lm1b",
    tokenizer="word",
    files={
        "train": "training-monolingual.tokenized.shuffled/news.en-*",
        "valid": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
        "test": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
    },
    min_freq=3,
    source="One Billion Word Benchmark, Chelba et al. 2013: statmt.org/lm-benchmark",
)
_ENWIK8 = Corpus(
    recipe="enwik8",
    tokenizer="byte",
    files={"train": "enwik8"},
    source="mattmahoney.net/dc/enwik8.zip",
)
_TEXT8 = Corpus(
    recipe="text8",
    tokenizer="char",
    files={"train": "text8"},
    source="mattmahoney.net/dc/text8.zip",
)

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "wt103-base": Experiment(
            corpus=_WT103, metric="perplexity", published=24.0, table="table 1",
            tgt_len=64, mem_len=640, clamp_len=400,
        ),
        "wt103-large": Experiment(
            corpus=_WT103, metric="perplexity", published=18.3, table="table 1",
            tgt_len=128, mem_len=1600, clamp_len=1000,
        ),
        "enwik8-base": Experiment(
            corpus=_ENWIK8, metric="bits_per_character", published=1.06, table="table 2",
            tgt_len=80, mem_len=2100, clamp_len=820,
        ),
        "enwik8-large": Experiment(
            corpus=_ENWIK8, metric="bits_per_character", published=0.99, table="table 2",
            tgt_len=128, mem_len=3800, clamp_len=1000,
        ),
        "text8-base": Experiment(
            corpus=_TEXT8, metric="bits_per_character", published=None, table="",
            tgt_len=80, mem_len=2100, clamp_len=820,
        ),
        "text8-large": Experiment(
            corpus=_TEXT8, metric="bits_per_character", published=1.08, table="table 3",
            tgt_len=128, mem_len=3800, clamp_len=1000,
        ),
        "lm1b-base": Experiment(
            corpus=_LM1B, metric="perplexity", published=23.5, table="table 4",
            tgt_len=32, mem_len=128, clamp_len=None,
        ),
        "lm1b-large": Experiment(
            corpus=_LM1B, metric="perplexity", published=21.8, table="table 4",
            tgt_len=32, mem_len=128, clamp_len=None,
        ),
    }
)  # fmt: skip
