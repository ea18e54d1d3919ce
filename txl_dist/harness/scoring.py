"""What workers do for the harness: they score and continue batches of requests.

How requests are divided into batches depends on them and on the batch size, not on the number of
workers, which therefore cannot change a result.

A text is read as in training and `txl eval`: from an empty memory, in segments of `tgt_len` tokens
that begin at its first token. So its length has no limit, and one log-likelihood over a document
equals the nats that `txl eval` reports for a split with that document alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from data_pipeline.streams.segments import IGNORED
from data_pipeline.tokenizers import Tokenizer
from txl_dist.checkpoint.tensors import Weights
from txl_dist.config.run_config import Precision
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError
from txl_dist.generation.generate import generate_from_ids
from txl_dist.generation.text import Sampling, TextLimits
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import EXACT_THREADS, require_triton, torch_threads
from txl_dist.sequence import SequenceReader


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    checkpoint: Path
    weights: Weights
    tgt_len: int
    mem_len: int
    precision: Precision
    device: str | None


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Score `continuation` after `context`, which has at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    wants_greedy: bool = True
    """Whether the answer must say if greedy decoding gives the continuation."""

    @property
    def group(self) -> object:
        """What the requests of a batch have in common."""
        return self.wants_greedy

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Continue `prompt`, with its own random generator."""

    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    limits: TextLimits

    @property
    def group(self) -> object:
        """What the requests of a batch have in common."""
        return self.sampling, self.limits

    def __len__(self) -> int:
        return len(self.prompt)


Request = TypeVar("Request", ScoringRequest, GenerationRequest)


@dataclass(frozen=True, slots=True)
class Unit(Generic[Request]):
    """A batch of requests of one class. `indices` are their places in the list of all requests."""

    source: ModelSource
    indices: tuple[int, ...]
    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return f"{len(self.indices)} harness requests, the first is number {self.indices[0]}"


def batches(
    source: ModelSource, requests: Sequence[Request], *, batch_size: int
) -> Iterator[Unit[Request]]:
    """Units of at most `batch_size` requests, the longest first, so that little is padded."""
    groups: dict[object, list[int]] = {}
    for index in sorted(range(len(requests)), key=lambda index: -len(requests[index])):
        groups.setdefault(requests[index].group, []).append(index)
    for group in groups.values():
        for first in range(0, len(group), batch_size):
            indices = tuple(group[first : first + batch_size])
            yield Unit(source, indices, tuple(requests[index] for index in indices))


@lru_cache(maxsize=1)
def open_model(source: ModelSource) -> tuple[TransformerXL, Tokenizer]:
    """Load the model and its tokenizer; the last one is kept. Raises CheckpointError."""
    stored = find_model(source.checkpoint, weights=source.weights)
    same_length = stored.config.same_length and source.mem_len > 0
    config = replace(stored.config, mem_len=source.mem_len, same_length=same_length)
    model, tokenizer = replace(stored, config=config).load_with_tokenizer()
    device = torch.device(source.device or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")  # the harness's default is cuda:0, also without a GPU
    require_triton(device)
    return model.to(device), tokenizer


def continue_prompts(unit: Unit[GenerationRequest]) -> list[str]:
    model, tokenizer = open_model(unit.source)
    with torch_threads(EXACT_THREADS):
        texts = generate_from_ids(
            model,
            tokenizer,
            [request.prompt for request in unit.requests],
            seeds=[request.seed for request in unit.requests],
            tgt_len=unit.source.tgt_len,
            sampling=unit.requests[0].sampling,
            limits=unit.requests[0].limits,
            batch_size=len(unit.requests),
            precision=unit.source.precision,
        )
        return [text.text for text in texts]


# Shapes: B requests, T segment tokens, N tokens of the longest request, D d_model, V vocabulary


def score(unit: Unit[ScoringRequest]) -> list[tuple[float, bool]]:
    """The log-likelihoods in nats, and whether greedy decoding gives the continuations.

    Raises CheckpointError for weights that give NaN.
    """
    source, requests = unit.source, unit.requests
    model, _ = open_model(source)
    input_BN, target_BN = _padded(requests)
    before_last = (input_BN.shape[1] - 1) // source.tgt_len * source.tgt_len
    reader = SequenceReader(
        model,
        state=model.inference_state(len(requests), max_tokens=before_last),
        tgt_len=source.tgt_len,
        precision=source.precision,
    )
    log_likelihood_B = torch.zeros(len(requests), dtype=torch.float64)
    is_greedy_B = torch.ones(len(requests), dtype=torch.bool)
    with torch_threads(EXACT_THREADS):
        for columns, hidden_BTD in reader.read_rows(input_BN):
            target_BT = target_BN[:, columns].to(reader.device)
            log_likelihood_B -= reader.nats(hidden_BTD, target_BT).double().sum(1).cpu()
            if requests[0].wants_greedy:
                is_scored_BT = target_BT != IGNORED
                # Logits only where they are needed: a vocabulary can have many thousands of words.
                logits_NV = reader.logits(hidden_BTD[is_scored_BT][None])[0]
                is_greedy_BT = torch.ones_like(is_scored_BT)
                is_greedy_BT[is_scored_BT] = logits_NV.argmax(-1) == target_BT[is_scored_BT]
                is_greedy_B &= is_greedy_BT.all(1).cpu()
    if not log_likelihood_B.isfinite().all():
        raise CheckpointError(
            f"{source.checkpoint}: the log-likelihood of a request is NaN or Inf. The model has "
            "diverged: use an older checkpoint (txl checkpoint list RUN)"
        )
    return [*zip(log_likelihood_B.tolist(), is_greedy_B.tolist(), strict=True)]


def _padded(requests: Sequence[ScoringRequest]) -> tuple[Tensor, Tensor]:
    """Input and target [B, N], padded at the end. Targets in the context are IGNORED."""
    input_BN = torch.zeros((len(requests), max(map(len, requests)) - 1), dtype=torch.long)
    target_BN = torch.full_like(input_BN, IGNORED)
    for row, request in enumerate(requests):
        tokens = torch.tensor(request.context + request.continuation)
        num_inputs, first_target = len(tokens) - 1, len(request.context) - 1
        input_BN[row, :num_inputs] = tokens[:-1]
        target_BN[row, first_target:num_inputs] = tokens[first_target + 1 :]
    return input_BN, target_BN
