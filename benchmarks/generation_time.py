"""Time per token of generation by text length, in batches, and of its products alone.

    python benchmarks/generation_time.py [--rounds 20]

One decoder per length has read a text of that length. Every round draws the same number of tokens
from each, so that other load on the machine affects all of them. A token attends to the memory and
to itself, so its time must not depend on how much was read before.

The second part compares the time of a token with that of its matrix products alone, for one prompt
and for several. Both take turns in one process, on one thread. One run is recorded with sizes and
strides of every product, and they are repeated on separate tensors of the same strides, so that
each product reads its data from RAM again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from figures import Figure, run_script
from model_speed import PLAIN
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from txl_dist.analysis.bench import time_rounds
from txl_dist.generation.generate import BatchDecoder
from txl_dist.generation.text import Sampling
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import torch_threads
from txl_dist.runtime.process import keep_freed_memory

TGT_LEN = 128
LENGTHS = (1_024, 4_096, 16_384, 65_536)
"""Tokens of text; the memory of PLAIN holds 128, so it is full at all of them."""
BATCH_SIZE = 8
TOKENS_PER_ROUND = 16
LIMIT = 1.1
LONG_MEMORY = ModelConfig(
    vocab_size=204, n_layer=6, d_model=256, n_head=8, d_head=32, d_inner=1024, mem_len=800
)
"""Small products and a long memory: other operations take the largest share of the time."""
SHARES = {1: 0.5, 16: 0.8}
"""Prompts -> least share of the products."""


def bench_generate(
    *,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    config: ModelConfig = PLAIN,
    long_memory: ModelConfig = LONG_MEMORY,
) -> Iterator[Figure]:
    """The time per token at each length, relative to the shortest, then that in a batch, then the
    share of the products alone.
    """
    keep_freed_memory()
    yield from _by_length(rounds, lengths, config)
    with torch_threads(1):
        for num_prompts, limit in SHARES.items():
            yield from _by_products(rounds, long_memory, num_prompts, limit)


def _by_length(rounds: int, lengths: Sequence[int], config: ModelConfig) -> Iterator[Figure]:
    model = TransformerXL(config)
    decoders = {length: _decoder(model, [length]) for length in lengths}
    batch = _decoder(model, [lengths[0]] * BATCH_SIZE)
    runs = {str(length): lambda d=decoder: _draw(d) for length, decoder in decoders.items()}
    times = time_rounds({**runs, "batch": lambda: _draw(batch)}, rounds=rounds)
    milliseconds = {name: times[name] / TOKENS_PER_ROUND * 1e3 for name in times}
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


def _by_products(
    rounds: int, config: ModelConfig, num_prompts: int, limit: float
) -> Iterator[Figure]:
    decoder = _decoder(TransformerXL(config), [config.mem_len + TGT_LEN] * num_prompts)
    alone = products_alone(decoder.draw)
    times = time_rounds({"draw": decoder.draw, "alone": alone}, rounds=rounds * TOKENS_PER_ROUND)
    milliseconds = {name: 1e3 * each for name, each in times.items()}
    prompts = "prompt" if num_prompts == 1 else "prompts"
    yield Figure(
        f"share of the products alone, {num_prompts} {prompts}, memory {config.mem_len}",
        milliseconds["alone"] / milliseconds["draw"],
        "of the time",
        limit,
        note=f"{milliseconds['draw']:.2f} ms, products {milliseconds['alone']:.2f} ms, "
        f"{num_operators(decoder.draw):,} operators",
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


def num_operators(run: Callable[[], object]) -> int:
    """Operators that one run calls, those that others call included, as torch's profiler counts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(row.count for row in profiler.key_averages() if row.key.startswith("aten::"))


# --- matrix products alone ------------------------------------------------------------------------


_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm_.default: 1,
}
"""Operator overload -> position of its left factor among the arguments."""


@dataclass
class _ProductRecorder(TorchDispatchMode):
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode, operators such as `linear` arrive here before they call their products.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        # This kernel computes two products without calling `bmm`.
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key, value = (factor.flatten(0, 1) for factor in args[:3])
            weight = query.new_empty(*query.shape[:2], key.shape[1])
            self.pairs += [
                (_like(query), _like(key).transpose(1, 2)),
                (_like(weight), _like(value)),
            ]
        elif func in _PRODUCTS:
            first = _PRODUCTS[func]
            left, right = (_like(factor) for factor in args[first : first + 2])
            self.pairs.append((left, right))
        return func(*args, **(kwargs or {}))


def products_alone(run: Callable[[], object]) -> Callable[[], object]:
    """A function that computes the matrix products of `run` and nothing else."""
    run()  # fills caches, which are not part of a normal run
    with _ProductRecorder() as recorder:
        run()
    products = [
        (left, right, left.new_empty(*left.shape[:-1], right.shape[-1]))
        for left, right in recorder.pairs
    ]

    def multiply() -> None:
        for left, right, out in products:
            torch.matmul(left, right, out=out)

    return multiply


def _like(factor: Tensor) -> Tensor:
    """A random tensor with the shape, strides and dtype of `factor`."""
    copy = torch.empty_strided(factor.shape, factor.stride(), dtype=factor.dtype)
    return copy.normal_()


if __name__ == "__main__":
    run_script(__doc__, bench_generate, rounds=20)
