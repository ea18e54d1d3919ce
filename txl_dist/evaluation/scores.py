"""Loss sums, and the scores that are computed from sums.

A mean of batch means would give a short last batch the weight of a full one. So `LossSums` are
added over lanes, micro-batches, ranks and chunks, and every score divides them once, at the end.

A score is a function of named sums, registered with those that it divides by:

    @score(needs="bytes")
    def bits_per_byte(sums: NamedSums) -> float:
        return sums["nats"] / (sums["bytes"] * math.log(2))

Everything that shows scores of a split shows all that are registered, with the label and the format
given here: `txl eval` with its JSON, files, intervals and MLflow runs, the metrics and lines of
training, `txl report` and model cards. So a new score is one function.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self, TypeAlias

from txl_dist.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "evaluations"
"""Of a run directory: scores during training (training/scores.py), and results of `txl eval`."""

NamedSums: TypeAlias = Mapping[str, float]
"""`nats`, and the units of the scored text that are known: `tokens`, `bytes` (UTF-8), `characters`,
`words` (what a word model predicts: words, line ends and document ends)."""

Finisher: TypeAlias = Callable[[NamedSums], float]


@dataclass(frozen=True, slots=True)
class ScoreDefinition:
    finish: Finisher
    needs: str
    """The sum without which there is no score."""
    label: str
    in_tables: bool
    in_lines: str
    """Its format in the lines of a run's log, such as `ppl {:.2f}`; empty: not there."""

    def text(self, value: float | None) -> str:
        """Four decimals; a word perplexity of an untrained model has more than 15 digits."""
        if value is None:
            return "-"
        return f"{value:.4f}" if value < 1e6 else f"{value:.4g}"


SCORES: dict[str, ScoreDefinition] = {}
"""By name, in the order in which they are shown."""


def score(
    *, needs: str, label: str = "", in_tables: bool = True, in_lines: str = ""
) -> Callable[[Finisher], Finisher]:
    """Register a function as a score with its name, from which its label follows by default."""

    def register(finish: Finisher) -> Finisher:
        name = finish.__name__
        label_or_name = label or name.replace("_", " ")
        SCORES[name] = ScoreDefinition(finish, needs, label_or_name, in_tables, in_lines)
        return finish

    return register


def metric_name(score_name: str) -> str:
    """The name of a score in metrics.jsonl, where the mean loss is `loss`."""
    return "loss" if score_name == "nats_per_token" else score_name


def in_lines(metrics: Mapping[str, float]) -> list[str]:
    """What the lines of a run's log show of metrics: `loss 3.4120`, `ppl 30.30`, `bpb 1.310`."""
    return [
        score.in_lines.format(metrics[metric_name(name)])
        for name, score in SCORES.items()
        if score.in_lines and metric_name(name) in metrics
    ]


def finish(sums: NamedSums) -> dict[str, float | None]:
    """All scores; None for one whose sum is not known, or not positive."""
    return {
        name: score.finish(sums) if sums.get(score.needs, 0) > 0 else None
        for name, score in SCORES.items()
    }


@score(needs="tokens", in_lines="loss {:.4f}")
def nats_per_token(sums: NamedSums) -> float:
    """The mean loss."""
    return sums["nats"] / sums["tokens"]


@score(needs="tokens", in_lines="ppl {:.2f}")
def perplexity(sums: NamedSums) -> float:
    return _exp(nats_per_token(sums))


@score(needs="tokens", in_tables=False)
def bits_per_token(sums: NamedSums) -> float:
    return nats_per_token(sums) / math.log(2)


@score(needs="bytes", in_lines="bpb {:.3f}")
def bits_per_byte(sums: NamedSums) -> float:
    """Comparable across tokenizers. End-of-document tokens add nats and no bytes."""
    return sums["nats"] / (sums["bytes"] * math.log(2))


@score(needs="characters", label="bits per char", in_tables=False)
def bits_per_character(sums: NamedSums) -> float:
    """Comparable across tokenizers."""
    return sums["nats"] / sums["characters"] / math.log(2)


@score(needs="words")
def word_perplexity(sums: NamedSums) -> float:
    """exp(nats per word). Comparable across tokenizers."""
    return _exp(sums["nats"] / sums["words"])


def _exp(nats: float) -> float:
    """Infinity if it exceeds the range of a float: math.exp raises OverflowError from 709.8 on."""
    return math.exp(nats) if nats < 700 else math.inf


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over scored targets; `num_bytes` counts the UTF-8 bytes of their text.

    It is 0 or negative if they are not known (`Tokenizer.token_bytes`).
    """

    nats: float = 0.0
    num_tokens: float = 0
    num_bytes: float = 0

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(LossSums)))

    @classmethod
    def of(cls, nats_BT: "Tensor", target_BT: "Tensor", byte_counts_V: "Tensor") -> Self:
        """Sums over the positions whose target is not negative.

        Shapes: B lanes, T segment tokens, V vocabulary. Nats are added in float64, because a
        float32 sum of a long split keeps only about 7 digits.
        """
        scored = target_BT[target_BT >= 0]
        return cls(
            nats=nats_BT.detach().double().sum().item(),
            num_tokens=scored.numel(),
            num_bytes=int(byte_counts_V[scored].sum()),
        )

    @property
    def named(self) -> dict[str, float]:
        return {"nats": self.nats, "tokens": self.num_tokens, "bytes": self.num_bytes}

    @property
    def metrics(self) -> dict[str, float]:
        """The scores that are known, with the names of a run's metrics: `loss` is the mean."""
        known = {name: value for name, value in finish(self.named).items() if value is not None}
        return {metric_name(name): value for name, value in known.items()}

    @property
    def nats_per_token(self) -> float:
        """Raises DataError without targets."""
        if self.num_tokens <= 0:
            raise DataError("no target was scored, so there is no mean loss; use a longer split")
        return nats_per_token(self.named)

    @property
    def perplexity(self) -> float:
        """Raises DataError without targets."""
        return _exp(self.nats_per_token)
