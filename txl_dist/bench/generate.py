"""`txl bench generate`: time per token at growing lengths of the text, and in batches.

One decoder per length has read a text of that length. Every round draws the same number of tokens
from each, so that other load on the machine affects all of them. A token attends to the memory and
to itself, so its time must not depend on how much was read before.
"""

from collections.abc import Iterator, Sequence

import torch

from txl_dist.bench.model import PLAIN
from txl_dist.bench.rounds import Figure, time_rounds
from txl_dist.generation.batch_decoder import BatchDecoder
from txl_dist.generation.sampling import Sampling
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.allocation import keep_freed_memory

TGT_LEN = 128
LENGTHS = (1_024, 4_096, 16_384, 65_536)
"""Tokens of text; the memory of PLAIN holds 128, so it is full at all of them."""
BATCH_SIZE = 8
TOKENS_PER_ROUND = 16
LIMIT = 1.1


def bench_generate(
    *, rounds: int, lengths: Sequence[int] = LENGTHS, config: ModelConfig = PLAIN
) -> Iterator[Figure]:
    """The time per token at each length, relative to the shortest, then that in a batch."""
    keep_freed_memory()
    model = TransformerXL(config)
    decoders = {length: _decoder(model, [length]) for length in lengths}
    batch = _decoder(model, [lengths[0]] * BATCH_SIZE)
    runs = {str(length): lambda d=decoder: _draw(d) for length, decoder in decoders.items()}
    times = time_rounds({**runs, "batch": lambda: _draw(batch)}, rounds=rounds)
    milliseconds = {name: times[name].median / TOKENS_PER_ROUND * 1e3 for name in times}
    shortest = milliseconds[str(lengths[0])]
    yield Figure(f"time per token after {lengths[0]:,} tokens of text", shortest, "ms")
    for length in lengths[1:]:
        yield Figure(
            f"time per token after {length:,} tokens of text",
            milliseconds[str(length)] / shortest,
            f"x after {lengths[0]:,}",
            LIMIT,
            at_most=True,
            note=f"{milliseconds[str(length)]:.2f} ms",
        )
    yield Figure(
        f"tokens per second of {BATCH_SIZE} prompts in a batch",
        BATCH_SIZE * shortest / milliseconds["batch"],
        "x one prompt",
        note=f"{BATCH_SIZE * 1e3 / milliseconds['batch']:,.0f} tokens/s",
    )


def _decoder(model: TransformerXL, lengths: Sequence[int]) -> BatchDecoder:
    """A decoder that has read random texts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    prompts = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
    decoder = BatchDecoder(
        model, prompts, seeds=range(len(lengths)), tgt_len=TGT_LEN, sampling=Sampling()
    )
    decoder.draw()
    return decoder


def _draw(decoder: BatchDecoder) -> None:
    for _ in range(TOKENS_PER_ROUND):
        decoder.draw()
