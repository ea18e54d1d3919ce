"""Generation: read the prompt in segments, then draw one token at a time with a KV cache."""

import codecs
from collections.abc import Iterator, Sequence

import torch

from data_pipeline.tokenizers import Tokenizer
from txl_dist.config.run_config import Precision
from txl_dist.generation.sampling import Sampling, next_token
from txl_dist.model.kv_cache import KVCache
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.precision import autocast


def generate_tokens(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    tgt_len: int,
    sampling: Sampling,
    seed: int,
    end: int | None = None,
    precision: Precision = "fp32",
) -> Iterator[int]:
    """Token ids that follow `prompt`, without limit or until `end` is drawn.

    The prompt can have any length above 0: the model reads it in segments of `tgt_len` tokens, as
    in training. A model without memory sees the last `tgt_len` tokens and reads them again for
    every token it draws.
    """
    if not prompt:
        raise ValueError("the prompt needs at least one token, for example the end of a document")
    generator = torch.Generator().manual_seed(seed)
    cache, num_read = model.empty_kv_cache(1), 0
    has_memory = model.config.mem_len > 0
    pending = list(prompt)
    if not has_memory:
        pending = pending[-tgt_len:]
    # Without memory, positions count from the segment's end: pad it to the length of training.
    min_tokens = 0 if model.config.encoding.allows_memory else tgt_len
    while True:
        # All but the last segment of the prompt only fill the cache.
        while len(pending) > tgt_len:
            _read(model, pending[:tgt_len], num_read, cache, precision, min_tokens)
            pending, num_read = pending[tgt_len:], num_read + tgt_len
        logits_V = _read(model, pending, num_read, cache, precision, min_tokens)
        num_read += len(pending)
        token = next_token(logits_V, sampling, generator)
        if token == end:
            return
        yield token
        if has_memory:
            pending = [token]
        else:  # in training it saw single segments only
            pending, num_read = [*pending, token][-tgt_len:], 0


def _read(
    model: TransformerXL,
    tokens: Sequence[int],
    num_read: int,
    cache: KVCache,
    precision: Precision,
    min_tokens: int,
) -> torch.Tensor:
    """Logits [V] of the token after `tokens`, on the CPU, when `num_read` tokens came before.

    The segment is padded at its end to `min_tokens`; no earlier token can see the padding.
    """
    device = next(model.parameters()).device
    num_tokens = max(min_tokens, len(tokens))
    input_BT = torch.zeros((1, num_tokens), dtype=torch.long, device=device)
    input_BT[0, : len(tokens)] = torch.tensor(tokens)
    age_BT = torch.arange(num_read, num_read + num_tokens, device=device)[None]
    with torch.no_grad(), autocast(precision, device):
        hidden_BTD, _ = model.hidden(input_BT, age_BT, cache)
        last_BTD = hidden_BTD[:, len(tokens) - 1 : len(tokens)]
        return model.logits(last_BTD)[0, 0].cpu()


def stream_text(
    tokens: Iterator[int], tokenizer: Tokenizer, *, after: int | None = None
) -> Iterator[str]:
    """Decode tokens to text, one complete character at a time.

    `after` is the last token of the prompt: a token's text can depend on the token before it, as
    the space between two words does.
    """
    # An incomplete character stays in the decoder until its last byte has come.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    previous = tokenizer.end_of_document if after is None else after
    for token in tokens:
        both = tokenizer.decode_bytes([previous, token])
        token_bytes = both.removeprefix(tokenizer.decode_bytes([previous]))
        previous = token
        if text := decoder.decode(token_bytes):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
