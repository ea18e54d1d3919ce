"""Memory in a loop of one's own: one step, a window, and windows cut anywhere agree."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import (
    MODERN,
    SHORT_AND_LONG,
    random_text,
    read_stream,
    small_model,
)
from txl_dist import Memory
from txl_dist.model.transformer_xl import TransformerXL

# Shapes: B rows, N tokens, L layers, M memory tokens, D d_model

NUM_ROWS, NUM_TOKENS, WIDTH = 3, 9, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    **MODERN,
    # Episodes are longer than the memory.
    "same_length": {"same_length": True, "mem_len": 3, "n_layer": 3},
}


def of_vectors(**options: Any) -> TransformerXL:
    vectors = {key: value for key, value in options.items() if key != "cutoffs"}
    return small_model(**({"vocab_size": None, "mem_len": NUM_TOKENS} | vectors))


def random_vectors(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def random_starts() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(NUM_ROWS, NUM_TOKENS, generator=generator) < 0.25


def read_in_pieces(
    model: TransformerXL, x_BND: Tensor, starts_BN: Tensor, cuts: list[int], *, cached: bool = False
) -> tuple[Tensor, Memory]:
    memory, outputs = Memory.empty(model, NUM_ROWS), []
    if cached:
        memory = memory.cached(model)
    for begin, end in pairwise([0, *cuts, NUM_TOKENS]):
        here = slice(begin, end)
        output, memory = memory.read(model, x_BND[:, here], starts=starts_BN[:, here])
        outputs.append(output)
    return torch.cat(outputs, dim=1), memory


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@given(cuts=st.sets(st.integers(1, NUM_TOKENS - 1)), cached=st.booleans())
@torch.no_grad()
def test_windows_cut_anywhere_give_the_same_numbers(
    options: dict[str, Any], cuts: set[int], cached: bool
) -> None:
    model, x_BND, starts_BN = of_vectors(**options), random_vectors(), random_starts()
    whole, memory = read_in_pieces(model, x_BND, starts_BN, [])
    pieces, memory_of_pieces = read_in_pieces(model, x_BND, starts_BN, sorted(cuts), cached=cached)
    assert_close(pieces, whole, atol=1e-9, rtol=1e-9)
    assert torch.equal(memory_of_pieces.age_B, memory.age_B)
    assert torch.equal(memory_of_pieces.valid(), memory.valid())
    # What is left of the last episode in a row depends on the cuts: an episode that begins with a
    # window clears it.
    hidden_BLMD = ~memory.valid()[:, None, :, None]
    vectors = [x.vectors().masked_fill(hidden_BLMD, 0) for x in (memory_of_pieces, memory)]
    assert_close(*vectors, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_a_memory_that_was_read_has_the_same_numbers_if_it_is_cached(
    options: dict[str, Any],
) -> None:
    model, x_BND = of_vectors(**options), random_vectors()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, x_BND, starts=random_starts())
    expected, _ = memory.read(model, x_BND)
    output, _ = memory.cached(model).read(model, x_BND)
    assert_close(output, expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_no_episode_sees_another() -> None:
    model, starts_BN = of_vectors(), random_starts()
    x_BND = random_vectors()
    episode_BN = starts_BN.long().cumsum(1)
    changed = torch.where((episode_BN == 1)[..., None], random_vectors(seed=1), x_BND)
    for cuts in ([], [2, 3], list(range(1, NUM_TOKENS))):
        first, _ = read_in_pieces(model, x_BND, starts_BN, cuts)
        second, _ = read_in_pieces(model, changed, starts_BN, cuts)
        others = episode_BN != 1
        assert torch.equal(first[others], second[others])
        assert not torch.equal(first[~others], second[~others])


@torch.no_grad()
def test_a_reset_row_reads_as_a_new_one_and_the_others_go_on() -> None:
    model, x_BND = of_vectors(), random_vectors()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, x_BND)
    continued, _ = memory.read(model, x_BND)
    new, _ = Memory.empty(model, NUM_ROWS).read(model, x_BND)
    for rows in (torch.tensor([False, True, False]), torch.tensor([1]), [1]):
        output, _ = memory.reset(rows).read(model, x_BND)
        assert_close(output[1], new[1])
        assert torch.equal(output[[0, 2]], continued[[0, 2]])
    for none in ([], torch.tensor([False] * NUM_ROWS)):
        assert memory.reset(none).age_B.tolist() == [NUM_TOKENS] * NUM_ROWS
    assert memory.age_B.tolist() == [NUM_TOKENS] * NUM_ROWS, "reset returns another memory"


@pytest.mark.parametrize("implementation", ["reference", "cpu", "sdpa"])
@pytest.mark.parametrize("encoding", ["sinusoidal", "shaw", "rotary", "alibi"])
@given(
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    is_cached=st.booleans(),
    with_starts=st.booleans(),
    is_saved=st.booleans(),
    num_steps=st.integers(1, NUM_TOKENS),
)
@torch.no_grad()
def test_what_is_not_finite_ends_with_its_episode(
    implementation: str,
    encoding: str,
    value: float,
    is_cached: bool,
    with_starts: bool,
    is_saved: bool,
    num_steps: int,
) -> None:
    """The next episode of the row has the numbers of one in an empty memory."""
    clamp_len = 3 if encoding == "shaw" else None
    model = of_vectors(attention=implementation, distance_encoding=encoding, clamp_len=clamp_len)
    x_BND, broken_BND = random_vectors(), random_vectors(seed=1)
    broken_BND[1, 4, 2] = value
    expected, _ = Memory.empty(model, NUM_ROWS).read(model, x_BND)
    _, memory = Memory.empty(model, NUM_ROWS).read(model, broken_BND)
    assert not torch.stack([*memory.tensors().values()][:-1]).isfinite().all()
    memory = memory.cached(model) if is_cached else memory
    starts_BN = torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.bool)
    starts_BN[1, 0] = with_starts
    if not with_starts:
        memory = memory.reset([1])
    if is_saved and not with_starts:
        memory = Memory.of_tensors(model, memory.tensors())
    outputs = []
    for here in (slice(num_steps), slice(num_steps, None)):
        if x_BND[:, here].numel():
            output, memory = memory.read(model, x_BND[:, here], starts=starts_BN[:, here])
            outputs.append(output[1])
    assert_close(torch.cat(outputs), expected[1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("place", ["vector", "memory"])
@torch.no_grad()
def test_a_window_of_several_episodes_that_is_not_finite_is_refused(
    is_cached: bool, place: str
) -> None:
    """Only in its row: where no other episode begins, the caller gets what was computed."""
    model, x_BND = of_vectors(), random_vectors()
    broken_BND = x_BND.clone()
    broken_BND[1, 2] = torch.inf
    first_BND, second_BND = (broken_BND, x_BND) if place == "memory" else (x_BND, broken_BND)
    _, memory = Memory.empty(model, NUM_ROWS).read(model, first_BND)
    memory = memory.cached(model) if is_cached else memory
    starts_BN = torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.bool)
    starts_BN[1, 5] = True
    with pytest.raises(ValueError, match="row 1 is not finite"):
        memory.read(model, second_BND, starts=starts_BN)
    memory = memory.uncached()
    _, memory = memory.read(model, second_BND[:, :5], starts=starts_BN[:, :5])
    output, _ = memory.read(model, second_BND[:, 5:], starts=starts_BN[:, 5:])
    assert output.isfinite().all()
    output, _ = memory.read(model, second_BND, starts=starts_BN.roll(1, 0))
    assert output[[0, 2]].isfinite().all()


def test_a_score_of_several_episodes_that_is_not_finite_is_refused() -> None:
    model, target_BT = small_model(), torch.full((NUM_ROWS, 4), -1)
    x_BTD = random_vectors()[:, :4]
    x_BTD[2, 1] = torch.nan
    with pytest.raises(ValueError, match="row 2 is not finite"):
        Memory.empty(model, NUM_ROWS).score(
            model, x_BTD, target_BT, starts=torch.arange(4).expand(NUM_ROWS, 4) == 2
        )


@pytest.mark.parametrize("is_cached", [False, True])
@torch.no_grad()
def test_rows_are_selected_exchanged_saved_and_loaded(is_cached: bool, tmp_path: Path) -> None:
    model, x_BND = of_vectors(**SHORT_AND_LONG), random_vectors()
    starts_BN = random_starts()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, x_BND, starts=starts_BN)
    expected, _ = memory.read(model, x_BND)
    memory = memory.cached(model) if is_cached else memory
    rows = torch.tensor([2, 0])
    output, _ = memory[rows].read(model, x_BND[rows])
    assert_close(output, expected[rows])
    other = Memory.empty(model, 2).with_rows([0], memory[[2]]).with_rows([1], memory[[0]])
    assert_close(other.read(model, x_BND[rows])[0], expected[rows])
    save_file(memory.tensors(), tmp_path / "memory.safetensors")
    loaded = Memory.of_tensors(model, load_file(tmp_path / "memory.safetensors"))
    assert torch.equal(loaded.read(model, x_BND)[0], expected)
    assert memory.to(dtype=torch.float32).tensors()["layer-0"].dtype == torch.float32
    assert_close(memory.read(model, x_BND)[0], expected)


@torch.no_grad()
def test_vectors_and_validity_are_a_memory() -> None:
    model, x_BND, starts_BN = of_vectors(), random_vectors(), random_starts()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, x_BND, starts=starts_BN)
    expected, _ = memory.read(model, x_BND)
    vectors_BLMD, valid_BM = memory.vectors(), memory.valid()
    assert vectors_BLMD.shape == (NUM_ROWS, 2, NUM_TOKENS, WIDTH)
    last_start = [max(row.nonzero().flatten().tolist(), default=0) for row in starts_BN]
    assert valid_BM.sum(1).tolist() == [NUM_TOKENS - start for start in last_start]
    assert_close(Memory.of_vectors(model, vectors_BLMD, valid_BM).read(model, x_BND)[0], expected)
    shorter = Memory.of_vectors(model, vectors_BLMD[:, :, 4:], valid_BM[:, 4:])
    assert_close(shorter.cached(model).read(model, x_BND)[0], shorter.read(model, x_BND)[0])
    hidden = vectors_BLMD.masked_fill(~valid_BM[:, None, :, None], torch.nan)
    assert_close(Memory.of_vectors(model, hidden, valid_BM).read(model, x_BND)[0], expected)


def test_a_window_has_gradients_and_dropout_and_the_memory_has_none() -> None:
    model, x_BND = of_vectors(dropout=0.5), random_vectors().requires_grad_()
    memory = Memory.empty(model, NUM_ROWS)
    first, memory = memory.read(model, x_BND)
    second, _ = Memory.empty(model, NUM_ROWS).read(model, x_BND)
    assert not torch.equal(first, second), "dropout"
    assert not memory.vectors().requires_grad
    later = random_vectors(seed=2).requires_grad_()
    memory.read(model, later)[0].sum().backward()
    assert later.grad is not None
    assert x_BND.grad is None
    model.eval()
    assert torch.equal(*(Memory.empty(model, NUM_ROWS).read(model, x_BND)[0] for _ in range(2)))


def test_a_model_of_ids_scores_with_a_memory_as_with_ages() -> None:
    model, text_BN = small_model(), random_text(2, 9)
    memory, nats = Memory.empty(model, 2), []
    for here in (slice(0, 4), slice(4, 8)):
        target = text_BN[:, here.start + 1 : here.stop + 1]
        nats_BT, memory = memory.score(model, text_BN[:, here], target)
        nats.append(nats_BT)
    expected_BN, _ = read_stream(model, text_BN, tgt_len=4)
    assert torch.equal(torch.cat(nats, 1), expected_BN)


@torch.no_grad()
def read_after_an_interrupt(memory: Memory, model: TransformerXL) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.read(model, random_vectors())
    handle.remove()
    memory.read(model, random_vectors())


@torch.no_grad()
def read_twice(memory: Memory, model: TransformerXL) -> None:
    for _ in range(2):
        memory.read(model, random_vectors())


@torch.no_grad()
def test_one_row_and_vectors_and_memories_of_another_precision() -> None:
    model, x_BND = of_vectors(), random_vectors()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, x_BND)
    expected, _ = memory.read(model, x_BND)
    assert_close(memory[1].read(model, x_BND[1:2])[0], expected[1:2])
    narrow = memory.to(dtype=torch.bfloat16)
    output, after = narrow.cached(model).read(model, x_BND)
    assert_close(output, narrow.read(model, x_BND)[0])
    assert after.tensors()["layer-0"].dtype == torch.bfloat16
    output, _ = memory.read(model, x_BND.bfloat16())  # as of an encoder under autocast
    assert output.dtype == torch.float64
    assert_close(output, memory.read(model, x_BND.bfloat16().double())[0])


X_BTD = torch.zeros(NUM_ROWS, 4, WIDTH)
VECTORS_BLMD, VALID_BM = torch.zeros(1, 2, 2, WIDTH), torch.ones(1, 2, dtype=torch.bool)
REFUSED: list[tuple[Any, str]] = [
    (lambda model, memory: memory.read(model, X_BTD[:2]), "expected 3 rows"),
    (lambda model, memory: memory.read(model, X_BTD[..., :5]), "d_model=6"),
    (lambda model, memory: memory.read(model, X_BTD[..., 0]), "vectors need"),
    (lambda model, memory: memory.read(model, X_BTD, starts=X_BTD[..., 0]), "expected torch.bool"),
    (lambda model, memory: memory.read(model, X_BTD.long()), "floating-point"),
    (
        lambda model, _: Memory.of_vectors(model, VECTORS_BLMD, torch.tensor([[True, False]])),
        "false, then true",
    ),
    (lambda model, _: Memory.of_vectors(model, X_BTD[None, :, :2], VALID_BM), "3 layers"),
    (lambda _, memory: memory.reset([1, 0, 0]), "write a mask as"),
    (lambda _, memory: memory.reset([1.0, 0.0]), "write a mask as"),
    *(
        (
            lambda _, memory, options=options: memory.with_rows(
                [0], Memory.empty(of_vectors(**options), 1)
            ),
            "cannot be replaced by layers",
        )
        for options in ({"mem_len": 2}, {"n_layer": 3})
    ),
    (lambda _, memory: memory.with_rows([0, 1], memory[[2]]), "cannot be replaced by layers"),
    (
        lambda *_: Memory.of_vectors(
            of_vectors(same_length=True), VECTORS_BLMD[:, :, :0], VALID_BM[:, :0]
        ),
        "at least one token in each layer",
    ),
    (
        lambda *_: Memory.empty(of_vectors(**SHORT_AND_LONG), 3).vectors(),
        r"different lengths; use tensors\(\)",
    ),
    (
        lambda *_: Memory.of_vectors(of_vectors(**SHORT_AND_LONG), VECTORS_BLMD, VALID_BM),
        r"different lengths; use of_tensors\(\)",
    ),
    (lambda model, memory: read_after_an_interrupt(memory.cached(model), model), "read before"),
    (lambda model, memory: read_twice(memory.cached(model), model), "was read before"),
    (lambda model, _: model.logits(X_BTD), "no logits"),
    (lambda model, _: Memory.of_tensors(model, {"age": torch.zeros(1)}), "found the"),
    (lambda model, memory: memory.score(model, X_BTD, None), "vocab_size"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    model = of_vectors()
    with pytest.raises(ValueError, match=message):
        call(model, Memory.empty(model, NUM_ROWS))


def test_a_model_of_vectors_has_no_tables() -> None:
    names = {name.partition(".")[0] for name, _ in of_vectors().named_parameters()}
    assert not names & {"table", "softmax"}


@pytest.mark.parametrize("rows", [torch.tensor([3]), [True, False]], ids=str)
def test_rows_that_a_memory_does_not_have_cannot_be_reset(rows: Any) -> None:
    with pytest.raises(IndexError):
        Memory.empty(of_vectors(), NUM_ROWS).reset(rows)


@torch.no_grad()
def test_a_cached_memory_that_was_reset_is_not_read_as_before() -> None:
    model = of_vectors()
    _, memory = Memory.empty(model, NUM_ROWS).read(model, random_vectors())
    cached = memory.cached(model)
    output, _ = cached.reset([1]).read(model, random_vectors())
    assert_close(output, memory.reset([1]).read(model, random_vectors())[0])
    with pytest.raises(ValueError, match="read before, or reset"):
        cached.read(model, random_vectors())
