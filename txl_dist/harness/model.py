"""`TransformerXLModel`: model `txl` of lm-evaluation-harness, and the checks of its arguments.

    --model_args checkpoint=RUN,mode=memory,workers=2

One harness process makes all requests, and our workers score them (docs/decisions/0035).
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from data_pipeline.system.strict import first_problem
from txl_dist.checkpoint.reader import Weights
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
    answer,
    batches,
)

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
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

    mode: Literal["memory", "windowed"] | None = None
    """None: `memory`, because it is how the model was trained; `windowed` without a memory."""
    max_length: PositiveInt | None = None
    """None: tgt_len + mem_len, the longest attention in training."""
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


@register_model("txl")
class TransformerXLModel(TemplateLM):
    """A checkpoint, a run (its newest checkpoint) or an exported model, with its tokenizer."""

    def __init__(self, checkpoint: str | Path, **arguments: Any) -> None:
        """`arguments`: see ModelArguments."""
        super().__init__()
        # Under torchrun and accelerate every process would do all the work.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: model txl distributes the requests of one "
                "harness process itself. Start it without torchrun or accelerate, and give "
                "workers=N in --model_args, with on=ray or on=ADDRESS for several machines"
            )
        try:  # on the harness's command line numbers are text
            self._arguments = chosen = ModelArguments.model_validate(arguments)
        except ValidationError as error:
            raise ConfigError(f"model argument {first_problem(error)}") from None
        stored = find_model(Path(str(checkpoint)).resolve(), weights=chosen.weights)
        self.tgt_len = chosen.tgt_len or stored.tgt_len
        try:
            config = stored.config.with_mem_len(chosen.mem_len)
        except ValueError as error:
            raise ConfigError(f"mem_len={chosen.mem_len}: {error}") from None
        self.mem_len = config.tokens_kept
        self.mode = chosen.mode or ("memory" if config.has_memory else "windowed")
        self.max_length = chosen.max_length or self.tgt_len + self.mem_len
        self.batch_size = chosen.batch_size
        if self.mode == "memory" and not config.has_memory:
            raise ConfigError("mode=memory: the model has no memory (mem_len=0); use mode=windowed")
        if self.mode == "windowed" and not config.has_memory and self.max_length > self.tgt_len:
            raise ConfigError(
                f"max_length={self.max_length}: without memory the model sees tgt_len="
                f"{self.tgt_len} tokens; give max_length={self.tgt_len} or less"
            )
        self._source = ModelSource(
            checkpoint=stored.path,
            weights=stored.weights,
            tgt_len=self.tgt_len,
            mem_len=self.mem_len,
            precision=chosen.precision,
            device=chosen.device,
        )
        _, self._tokenizer = stored.load_with_tokenizer()
        is_marked = self._tokenizer.opens_documents
        self._add_bos = is_marked if chosen.add_bos_token is None else chosen.add_bos_token
        end_of_document = self._tokenizer.end_of_document
        self._prefix_token = end_of_document if is_marked else self._token_of_prefix(chosen.prefix)
        self._num_unknown = 0

    # --- what the harness calls ---------------------------------------------------------------

    def loglikelihood(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it."""
        self._warn_of_unknown(requests, ["".join(request.args) for request in requests])
        pairs = [self._pair(request) for request in requests]
        return self._cached(requests, self._run(pairs, "loglikelihood", disable_tqdm))

    def loglikelihood_rolling(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each document, whose first token follows the prefix token."""
        self._warn_of_unknown(requests, [request.args[0] for request in requests])
        documents = [self._windows(request.args[0]) for request in requests]
        windows = [window for document in documents for window in document]
        scores = iter(self._run(windows, "loglikelihood_rolling", disable_tqdm))
        return self._cached(requests, [sum(next(scores)[0] for _ in each) for each in documents])

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, before its first stop string."""
        seed = self._arguments.seed
        prompts = [self._prompt(request, seed + i) for i, request in enumerate(requests)]
        self._warn_of_unknown(requests, [request.args[0] for request in requests])
        return self._cached(requests, self._run(prompts, "generate_until", disable_tqdm))

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids. A text begins with the end-of-document token, as documents in training do."""
        add_bos = self._add_bos if add_special_tokens is None else add_special_tokens
        bos = [self._tokenizer.end_of_document] if add_bos else []
        return [*bos, *self._tokenizer.encode(string).tolist()]

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token

    def get_model_info(self) -> dict[str, Any]:
        """What determines the results, for the `config` of the harness's results."""
        stored = find_model(self._source.checkpoint, weights=self._source.weights)
        return {
            "model_source": "txl",
            "checkpoint": str(self._source.checkpoint),
            "model_digest": stored.digest,
            "weights": self._source.weights,
            "mode": self.mode,
            "max_length": self.max_length if self.mode == "windowed" else None,
            "tgt_len": self.tgt_len,
            "mem_len": self.mem_len,
            "precision": self._source.precision,
            "add_bos_token": self._add_bos,
            "prefix_token_id": self._prefix_token,
            "unknown_symbols": self._num_unknown,
        }

    # --- texts to requests --------------------------------------------------------------------

    def _pair(self, request: "Instance") -> ScoringRequest:
        context, continuation = request.args
        if context:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
        else:
            context_ids = [self.prefix_token_id]
            continuation_ids = self.tok_encode(continuation, add_special_tokens=False)
        if not continuation_ids:
            raise DataError(
                f"{_name(request)}: the continuation {continuation!r} has no token after the "
                f"context ...{context[-40:]!r} with this tokenizer, so it has no likelihood"
            )
        # A context of spaces alone can have no token; the prefix token replaces it.
        context_ids = context_ids or [self.prefix_token_id]
        if self.mode == "windowed":
            num_context = self.max_length + 1 - len(continuation_ids)
            if num_context < 1:
                raise DataError(
                    f"{_name(request)}: the continuation has {len(continuation_ids)} tokens, "
                    f"windows have max_length={self.max_length}, so it cannot be scored in one. "
                    "Give a larger max_length, or mode=memory, which has no longest length"
                )
            context_ids = context_ids[-num_context:]
        return ScoringRequest(tuple(context_ids), tuple(continuation_ids))

    def _windows(self, text: str) -> list[ScoringRequest]:
        tokens = self.tok_encode(text, add_special_tokens=False)
        if self.mode == "windowed":
            windows = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
        else:
            pairs = [([self.prefix_token_id], tokens)] if tokens else []
        return [
            ScoringRequest(tuple(context), tuple(continuation), wants_greedy=False)
            for context, continuation in pairs
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
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return GenerationRequest(tuple(tokens), seed, sampling, limits)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        raise NotImplementedError("`loglikelihood` does not call it")

    # --- workers ------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request], name: str, disable_tqdm: bool) -> list[Any]:
        """The answers to all requests, in their order."""
        answers: list[Any] = [None] * len(requests)
        units = list(batches(self._source, requests, batch_size=self.batch_size))
        with (
            open_workers(self._arguments.on, self._arguments.workers, use_gpus=True) as workers,
            tqdm(total=len(requests), desc=name, disable=disable_tqdm) as progress,
        ):
            for number, of_unit in workers.map(answer, units):
                for index, each in zip(units[number].indices, of_unit, strict=True):
                    answers[index] = each
                progress.update(len(of_unit))
        return answers

    def _cached(self, requests: "list[Instance]", results: list[Any]) -> list[Any]:
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(request.request_type, request.args, result)
        return results

    # --- checks -------------------------------------------------------------------------------

    def _warn_of_unknown(self, requests: "list[Instance]", texts: Sequence[str]) -> None:
        """Warn of symbols that are not in the vocabulary: how many of which."""
        unknown = [self._tokenizer.unknown_symbols(text) for text in texts]
        total: Counter[str] = sum(unknown, Counter())
        if total:
            log.warning(
                "%s: %s, in %d of %d requests; the model reads the unknown token instead",
                requests[0].request_type,
                describe_unknown(total),
                sum(map(bool, unknown)),
                len(requests),
            )
        self._num_unknown += total.total()

    def _token_of_prefix(self, prefix: str) -> int:
        ids = self._tokenizer.encode(prefix)
        if not len(ids) or self._tokenizer.decode(ids) != prefix:
            raise ConfigError(
                f"prefix={prefix!r} is not in the vocabulary of this model, whose documents do not "
                "begin with a token. Give a text that precedes others, such as prefix=' '"
            )
        return int(ids[-1])


def _name(request: "Instance") -> str:
    """The name of a request in errors."""
    return f"task {request.task_name}, document {request.doc_id}, {request.request_type}"
