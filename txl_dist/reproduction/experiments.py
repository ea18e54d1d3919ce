"""The paper's experiments: their data, their evaluation, and the published result.

Source: Dai et al. 2019, arXiv:1901.02860, tables 1 to 4, and the settings of the published scripts.
The training settings of an experiment are in configs/paper/NAME.yaml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from data_pipeline.tokenizers.recipes import RECIPES, RecipeName

Metric = Literal["perplexity", "bits_per_character"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFile:
    """A file as it was published. What is not known is None, and not compared."""

    size: int | None = None
    """Bytes."""
    digest: str | None = None
    """ALGORITHM:HEX, of hashlib."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way in which the files of a corpus are published."""

    inputs: Mapping[str, str]
    """Path or pattern by split, below the directory that the user gives."""
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    """By name; {} if the files differ from place to place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The published files of a corpus, and how they become a dataset."""

    recipe: RecipeName
    format: str = "text"
    layouts: tuple[Layout, ...]
    """The first one that is there is used. With the recipe's fixed splits, it has only train."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """By split, as published, with the line ends of word models; {} if not known."""
    words: int | None = None
    """Of the vocabulary, as published, with the line end; None if not known."""
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


# sha1 of the WikiText-103 files: those that GluonNLP checks. sha256 of enwik8 and text8: of files
# that also have the md5 that the publisher gives.
_WT103 = Corpus(
    recipe="wt103",
    format="auto",
    layouts=(
        Layout(
            inputs={
                "train": "wiki.train.tokens",
                "valid": "wiki.valid.tokens",
                "test": "wiki.test.tokens",
            },
            files={
                "wiki.train.tokens": PublishedFile(
                    digest="sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211"
                ),
                "wiki.valid.tokens": PublishedFile(
                    digest="sha1:c326ac59dc587676d58c422eb8a03e119582f92b"
                ),
                "wiki.test.tokens": PublishedFile(
                    digest="sha1:8a5befc548865cec54ed4273cf87dbbad60d1e47"
                ),
            },
        ),
        # Hugging Face: the folder of this configuration among others, or that folder itself.
        *(
            Layout(
                inputs={
                    "train": f"{folder}train-*.parquet",
                    "valid": f"{folder}validation-*.parquet",
                    "test": f"{folder}test-*.parquet",
                }
            )
            for folder in ("wikitext-103-v1/", "")
        ),
        # The same text without <unk>: another vocabulary.
        Layout(
            inputs={
                "train": "wiki.train.raw",
                "valid": "wiki.valid.raw",
                "test": "wiki.test.raw",
            }
        ),
    ),
    tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
    words=267_735,
    source="WikiText-103 (word level), Merity et al. 2016: wikitext-103-v1.zip, or wikitext-103-v1 "
    "of Hugging Face's Salesforce/wikitext",
)
_LM1B = Corpus(
    recipe="lm1b",
    layouts=(
        Layout(
            # The benchmark's test set is the first held-out file (ciprian-chelba/
            # 1-billion-word-language-modeling-benchmark, issue 4), also of the paper, whose code
            # selects on it too.
            inputs={
                "train": "training-monolingual.tokenized.shuffled/news.en-*",
                "valid": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
                "test": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
            },
            files={
                **{f"news.en-{n:05}-of-00100": PublishedFile() for n in range(1, 100)},
                **{f"news.en.heldout-{n:05}-of-00050": PublishedFile() for n in (0, 1)},
            },
        ),
    ),
    source="One Billion Word Benchmark, Chelba et al. 2013: statmt.org/lm-benchmark",
)
_ENWIK8 = Corpus(
    recipe="enwik8",
    layouts=(
        Layout(
            inputs={"train": "enwik8"},
            files={
                "enwik8": PublishedFile(
                    size=RECIPES["enwik8"].published_bytes,
                    digest="sha256:"
                    "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
                )
            },
        ),
    ),
    source="mattmahoney.net/dc/enwik8.zip",
)
_TEXT8 = Corpus(
    recipe="text8",
    layouts=(
        Layout(
            inputs={"train": "text8"},
            files={
                "text8": PublishedFile(
                    size=RECIPES["text8"].published_bytes,
                    digest="sha256:"
                    "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
                )
            },
        ),
    ),
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
