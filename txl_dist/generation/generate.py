"""Generation: read the prompt in segments, then one token at a time, the state carried along."""

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
    """Token ids after `prompt` (not empty), for ever or until `end` is drawn.

    The prompt may be of any length: all of it passes the memory, `tgt_len` tokens at a time.
    Without memory the last `tgt_len` tokens are all that counts, and are read again every time.
    """
    if not prompt:
        raise ValueError("the prompt needs at least one token; an empty text has the document's")
    generator = torch.Generator().manual_seed(seed)
    state, num_read = model.empty_state(1), 0
    has_memory = model.config.mem_len > 0
    pending = list(prompt)
    if not has_memory:
        pending = pending[-tgt_len:]
    # Without memory, positions count from the segment's end: pad it to the length of training.
    whole = 0 if model.config.encoding.allows_memory else tgt_len
    while True:
        while len(pending) > tgt_len:
            _read(model, pending[:tgt_len], num_read, state, precision, whole)
            pending, num_read = pending[tgt_len:], num_read + tgt_len
        logits_V = _read(model, pending, num_read, state, precision, whole)
        num_read += len(pending)
        token = next_token(logits_V, sampling, generator)
        if token == end:
            return
        yield token
        if has_memory:
            pending = [token]
        else:  # what it was trained on is the segment, so that is read again
            pending, num_read = [*pending, token][-tgt_len:], 0


def _read(
    model: TransformerXL,
    tokens: Sequence[int],
    num_read: int,
    state: KVCache,
    precision: Precision,
    whole: int,
) -> torch.Tensor:
    """Read tokens after `num_read` others; the next token's logits [V] on the CPU.

    The segment is padded to `whole` tokens, which those before the padding cannot see.
    """
    device = next(model.parameters()).device
    num_tokens = max(whole, len(tokens))
    input_BT = torch.zeros((1, num_tokens), dtype=torch.long, device=device)
    input_BT[0, : len(tokens)] = torch.tensor(tokens)
    age_BT = torch.arange(num_read, num_read + num_tokens, device=device)[None]
    with torch.no_grad(), autocast(precision, device):
        hidden_BTD, _ = model.hidden(input_BT, age_BT, state)
        last_BTD = hidden_BTD[:, len(tokens) - 1 : len(tokens)]
        return model.logits(last_BTD)[0, 0].cpu()


def stream_text(
    tokens: Iterator[int], tokenizer: Tokenizer, *, after: int | None = None
) -> Iterator[str]:
    """Text of the tokens as soon as it is whole: never half a character.

    A token's text may depend on the one before it, as the blank between two words does; `after` is
    the last token of the prompt.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = tokenizer.end_of_document if after is None else after
    for token in tokens:
        both, before = tokenizer.decode_bytes([last, token]), tokenizer.decode_bytes([last])
        last = token
        if text := decoder.decode(both.removeprefix(before)):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
