"""`TransformerXLModel`: model `txl` of lm-evaluation-harness, and the checks of its arguments.

    --model_args checkpoint=RUN,mem_len=640,workers=2

One harness process makes all requests, and our workers score them (docs/decisions/0035). A token is
scored with everything before it in its request, through the memory; by a model without memory, in
windows of `tgt_len` tokens, as the harness defines them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from data_pipeline.system.strict import first_problem
from txl_dist.checkpoint.tensors import Weights
from txl_dist.cli.options import open_workers
from txl_dist.config.run_config import Precision
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import ConfigError, DataError
from txl_dist.generation.text import Sampling, TextLimits, describe_unknown
from txl_dist.harness.scoring import (
    GenerationRequest,
    ModelSource,
    Request,
    ScoringRequest,
    Unit,
    batches,
    continue_prompts,
    score,
)

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ConfigError(
        f"lm-evaluation-harness is not installed ({error}). Install it: "
        "pip install 'txl-dist[lm-eval]'"
    ) from None

log = logging.getLogger(__name__)

GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class ModelArguments(BaseModel):
    """The arguments of model `txl` in `--model_args`, apart from `checkpoint`.

    Their table is in docs/how_to/evaluate_with_lm_eval.md. None: as in training.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tgt_len: PositiveInt | None = None
    mem_len: NonNegativeInt | None = None
    batch_size: PositiveInt = 1
    max_batch_size: int | None = None
    """Of `batch_size=auto`, which is refused; the harness always passes it."""
    device: str | None = None
    """As the harness names it; None: a GPU if the worker has one."""
    workers: PositiveInt = 1
    on: str = "processes"
    precision: Precision = "fp32"
    weights: Weights = "auto"
    add_bos_token: bool | None = None
    prefix: str = "\n"
    seed: int = 0
    max_gen_toks: PositiveInt = 256


Answer = TypeVar("Answer")


@register_model("txl")
class TransformerXLModel(LM):
    """A checkpoint, a run (its newest checkpoint) or an exported model, with its tokenizer."""

    def __init__(self, checkpoint: str | Path, **arguments: Any) -> None:
        super().__init__()
        try:  # on the harness's command line numbers are text
            self._arguments = chosen = ModelArguments.model_validate(arguments)
        except ValidationError as error:
            raise ConfigError(f"model argument {first_problem(error)}") from None
        self._stored = stored = find_model(Path(str(checkpoint)).resolve(), weights=chosen.weights)
        try:
            config = stored.config.with_mem_len(chosen.mem_len)
        except ValueError as error:
            raise ConfigError(f"mem_len={chosen.mem_len}: {error}") from None
        self.has_memory = config.has_memory
        self.source = ModelSource(
            checkpoint=stored.path,
            weights=stored.weights,
            tgt_len=chosen.tgt_len or stored.tgt_len,
            mem_len=config.tokens_kept,
            precision=chosen.precision,
            device=chosen.device,
        )
        _, self._tokenizer = stored.load_with_tokenizer()
        is_marked = self._tokenizer.opens_documents
        self._add_bos = is_marked if chosen.add_bos_token is None else chosen.add_bos_token
        self._mark = self._tokenizer.end_of_document
        self.prefix_token_id = self._mark if is_marked else self._token_of_prefix(chosen.prefix)
        self._num_unknown = 0

    # --- what the harness calls ---------------------------------------------------------------

    def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it."""
        self._warn_of_unknown(requests, ["".join(request.args) for request in requests])
        pairs = [self._pair(request) for request in requests]
        return self._cached(requests, self._run(score, pairs))

    def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
        """The log-likelihood of each document, whose first token follows the prefix token."""
        self._warn_of_unknown(requests, [request.args[0] for request in requests])
        documents = [self._windows(request.args[0]) for request in requests]
        windows = [window for document in documents for window in document]
        scores = iter(self._run(score, windows))
        return self._cached(requests, [sum(next(scores)[0] for _ in each) for each in documents])

    def generate_until(self, requests: "list[Instance]") -> list[str]:
        """The continuation of each context, before its first stop string."""
        self._warn_of_unknown(requests, [request.args[0] for request in requests])
        seed = self._arguments.seed
        prompts = [self._prompt(request, seed + i) for i, request in enumerate(requests)]
        return self._cached(requests, self._run(continue_prompts, prompts))

    def get_model_info(self) -> dict[str, Any]:
        """What determines the results, for the `config` of the harness's results."""
        return {
            "model_source": "txl",
            **asdict(self.source),
            "checkpoint": str(self.source.checkpoint),
            "model_digest": self._stored.digest,
            "add_bos_token": self._add_bos,
            "prefix_token_id": self.prefix_token_id,
            "unknown_symbols": self._num_unknown,
        }

    # --- texts to requests --------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    def _marked_ids(self, text: str) -> list[int]:
        """Token ids of a text that begins with the end-of-document token, as in training."""
        return [*([self._mark] if self._add_bos else []), *self._ids(text)]

    def _pair(self, request: "Instance") -> ScoringRequest:
        context, continuation = request.args
        if context:  # blanks at its end belong to the continuation, as the harness defines it
            context_ids = self._marked_ids(context.rstrip())
            continuation_ids = self._marked_ids(context + continuation)[len(context_ids) :]
        else:
            context_ids, continuation_ids = [], self._ids(continuation)
        if not continuation_ids:
            raise DataError(
                f"{_name(request)}: the continuation {continuation!r} has no token after the "
                f"context ...{context[-40:]!r} with this tokenizer, so it has no likelihood"
            )
        context_ids = context_ids or [self.prefix_token_id]
        if not self.has_memory:
            num_context = self.source.tgt_len + 1 - len(continuation_ids)
            if num_context < 1:
                raise DataError(
                    f"{_name(request)}: the continuation has {len(continuation_ids)} tokens, but "
                    f"without memory the model sees tgt_len={self.source.tgt_len}"
                )
            context_ids = context_ids[-num_context:]
        return ScoringRequest(tuple(context_ids), tuple(continuation_ids))

    def _windows(self, text: str) -> list[ScoringRequest]:
        ids = self._ids(text)
        length = max(1, len(ids)) if self.has_memory else self.source.tgt_len
        windows = get_rolling_token_windows(ids, self.prefix_token_id, length, context_len=1)
        return [
            ScoringRequest(tuple(context), tuple(continuation), wants_greedy=False)
            for context, continuation in map(make_disjoint_window, windows)
        ]

    def _prompt(self, request: "Instance", seed: int) -> GenerationRequest:
        context, kwargs = request.args
        options = normalize_gen_kwargs(kwargs, self._arguments.max_gen_toks)
        if unknown := sorted(set(options) - GENERATION_OPTIONS):
            raise ConfigError(
                f"{_name(request)}: generation options {', '.join(unknown)} are not supported; "
                f"supported are {', '.join(sorted(GENERATION_OPTIONS))}"
            )
        try:
            sampling = Sampling(
                temperature=options.get("temperature", 0.0) if options["do_sample"] else 0.0,
                top_k=options.get("top_k"),
                top_p=options.get("top_p"),
            )
            until = tuple(string for string in options["until"] if string)
            limits = TextLimits(max_tokens=options["max_gen_toks"], stop=until)
        except ValueError as error:
            raise ConfigError(f"{_name(request)}: {error}") from None
        tokens = self._marked_ids(context) or [self.prefix_token_id]
        return GenerationRequest(tuple(tokens), seed, sampling, limits)

    # --- workers ------------------------------------------------------------------------------

    def _run(
        self, work: Callable[[Unit[Request]], list[Answer]], requests: Sequence[Request]
    ) -> list[Answer]:
        """The answers to all requests, in their order."""
        chosen = self._arguments
        units = list(batches(self.source, requests, batch_size=chosen.batch_size))
        answers: dict[int, Answer] = {}
        with (
            open_workers(chosen.on, chosen.workers, use_gpus=True) as workers,
            tqdm(total=len(requests), desc=work.__name__) as progress,
        ):
            for number, of_unit in workers.map(work, units):
                answers.update(zip(units[number].indices, of_unit, strict=True))
                progress.update(len(of_unit))
        return [answers[index] for index in range(len(requests))]

    def _cached(self, requests: "list[Instance]", results: list[Answer]) -> list[Answer]:
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(request.request_type, request.args, result)
        return results

    # --- checks -------------------------------------------------------------------------------

    def _warn_of_unknown(self, requests: "list[Instance]", texts: Sequence[str]) -> None:
        unknown: Counter[str] = Counter()
        for text in texts:
            unknown += self._tokenizer.unknown_symbols(text)
        if unknown:
            log.warning("%s: %s", requests[0].request_type, describe_unknown(unknown))
        self._num_unknown += unknown.total()

    def _token_of_prefix(self, prefix: str) -> int:
        ids = self._tokenizer.encode(prefix)
        if not len(ids) or self._tokenizer.decode(ids) != prefix:
            raise ConfigError(
                f"prefix={prefix!r} is not in the vocabulary of this model, whose documents do not "
                "begin with a token. Give a text that precedes others, such as prefix=' '"
            )
        return int(ids[-1])


def _name(request: "Instance") -> str:
    return f"task {request.task_name}, document {request.doc_id}, {request.request_type}"
