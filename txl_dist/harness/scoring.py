"""What a worker computes for one unit: log-likelihoods, or texts.

A text is read as in training and `txl eval`: from an empty memory, in segments of `tgt_len` tokens
that begin at its first token. So its length has no limit, and one log-likelihood over a document
equals the nats that `txl eval` reports for a split with that document alone.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from data_pipeline.streams.segments import IGNORED
from data_pipeline.tokenizers import Tokenizer
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError
from txl_dist.generation.generate import generate_batch
from txl_dist.harness.requests import GenerationRequest, ModelSource, ScoringRequest, Unit
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import EXACT_THREADS, autocast, torch_threads

# Shapes: B requests, T segment tokens, N tokens of the longest request, D d_model, V vocabulary


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of a continuation in nats, and whether greedy decoding would give it."""

    log_likelihood: float
    is_greedy: bool


@lru_cache(maxsize=1)
def open_model(source: ModelSource) -> tuple[TransformerXL, Tokenizer]:
    """Load the model and its tokenizer; the last one is kept. Raises CheckpointError."""
    stored = find_model(source.checkpoint, weights=source.weights)
    config = replace(stored.config, mem_len=source.mem_len)
    model, tokenizer = replace(stored, config=config).load_with_tokenizer()
    return model.to(_device(source.device)), tokenizer


def _device(name: str | None) -> str:
    """The device on this worker. The harness's default is cuda:0, also where there is no GPU."""
    name = name or "cuda"
    return "cpu" if name.startswith("cuda") and not torch.cuda.is_available() else name


def score_unit(unit: Unit[ScoringRequest]) -> list[Score]:
    """The scores of all requests of a unit. Raises CheckpointError for weights that give NaN."""
    model, _ = open_model(unit.source)
    with torch_threads(EXACT_THREADS):
        nats_B, is_greedy_B = _score(model, unit.requests, unit.source)
    if not all(map(math.isfinite, nats_B)):
        raise CheckpointError(
            f"{unit.source.checkpoint}: the log-likelihood of a request is not finite. The model "
            "has diverged: use an older checkpoint (txl checkpoint list RUN)"
        )
    return [Score(-nats, greedy) for nats, greedy in zip(nats_B, is_greedy_B, strict=True)]


def generate_unit(unit: Unit[GenerationRequest]) -> list[str]:
    """The continuations of all prompts of a unit, which have the same sampling and limits."""
    model, tokenizer = open_model(unit.source)
    first = unit.requests[0]
    with torch_threads(EXACT_THREADS):
        texts = generate_batch(
            model,
            tokenizer,
            [request.prompt for request in unit.requests],
            seeds=[request.seed for request in unit.requests],
            tgt_len=unit.source.tgt_len,
            sampling=first.sampling,
            limits=first.limits,
            precision=unit.source.precision,
        )
    return [text.text for text in texts]


def _score(
    model: TransformerXL, requests: tuple[ScoringRequest, ...], source: ModelSource
) -> tuple[list[float], list[bool]]:
    input_BN, target_BN = _padded(requests, _row_length(model, requests, source.tgt_len))
    device, cache = next(model.parameters()).device, model.inference_state(len(requests))
    wants_greedy = any(request.wants_greedy for request in requests)
    nats_B = torch.zeros(len(requests), dtype=torch.float64)
    is_greedy_B = torch.ones(len(requests), dtype=torch.bool)
    for first in range(0, input_BN.shape[1], source.tgt_len):
        columns = slice(first, first + source.tgt_len)
        input_BT, target_BT = input_BN[:, columns].to(device), target_BN[:, columns].to(device)
        age_T = torch.arange(first, first + input_BT.shape[1], device=device)
        with torch.no_grad(), autocast(source.precision, device):
            hidden_BTD, _ = model.hidden(input_BT, age_T.expand_as(input_BT), cache)
            nats_B += model.softmax(hidden_BTD, target_BT, model.table).double().sum(1).cpu()
            if wants_greedy:
                is_greedy_B &= _is_greedy(model, hidden_BTD, target_BT).all(1).cpu()
    return nats_B.tolist(), is_greedy_B.tolist()


def _is_greedy(model: TransformerXL, hidden_BTD: Tensor, target_BT: Tensor) -> Tensor:
    """Whether each target is the most likely token, [B, T]; true where there is no target."""
    is_greedy_BT = torch.ones_like(target_BT, dtype=torch.bool)
    is_scored_BT = target_BT != IGNORED
    # Logits only where they are needed: a vocabulary can have many thousands of words.
    logits_NV = model.logits(hidden_BTD[is_scored_BT][None])[0]
    is_greedy_BT[is_scored_BT] = logits_NV.argmax(-1) == target_BT[is_scored_BT]
    return is_greedy_BT


def _row_length(model: TransformerXL, requests: tuple[ScoringRequest, ...], tgt_len: int) -> int:
    """Inputs of the longest request; absolute positions need whole segments, as in training."""
    longest = max(map(len, requests)) - 1
    return longest if model.config.encoding.allows_memory else -(-longest // tgt_len) * tgt_len


def _padded(requests: tuple[ScoringRequest, ...], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Input and target [B, N], padded at the end. Targets in the context are IGNORED."""
    input_BN = torch.zeros((len(requests), num_tokens), dtype=torch.long)
    target_BN = torch.full_like(input_BN, IGNORED)
    for row, request in enumerate(requests):
        tokens = torch.tensor(request.context + request.continuation)
        num_inputs, first_target = len(tokens) - 1, len(request.context) - 1
        input_BN[row, :num_inputs] = tokens[:-1]
        target_BN[row, first_target:num_inputs] = tokens[first_target + 1 :]
    return input_BN, target_BN
