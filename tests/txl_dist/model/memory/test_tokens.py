"""`model.memory: tokens` and `recurrent+tokens`, against attention that is written out."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import random_text, small_model
from tests.support.training_runs import TINY
from tests.support.written_out import assert_losses, attend
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL

M, TGT_LEN, NUM_SEGMENTS = 3, 4, 4  # M: memory_tokens of small_model
"""Where the documents of each lane begin."""


def visible(
    key: tuple[str, int], query: tuple[str, int], start: int, mem_len: int, age: list[int]
) -> bool:
    """The rules of the docstring, for ("past" | "read" | "text" | "write", position or slot)."""
    order = ["past", "read", "text", "write"]
    last = start + TGT_LEN - 1
    rank = [(order.index(kind), number) for kind, number in (key, query)]
    if rank[0] > rank[1]:
        return False
    # The position whose document the query belongs to.
    position = {"read": start, "text": query[1], "write": last}[query[0]]
    document_start = position - age[position]
    if key[0] in ("past", "text"):
        return key[1] >= document_start
    return query[0] == "read" or key[0] == "write" or document_start < start


def by_hand(model: TransformerXL, text_N: Tensor, age: list[int], mem_len: int) -> Tensor:
    """Nats of one lane, with the attention of every token computed by itself."""
    state, past = torch.zeros(M, model.config.d_model).double(), [[] for _ in model.layers]
    nats = []
    for start in range(0, TGT_LEN * NUM_SEGMENTS, TGT_LEN):
        positions = range(start, start + TGT_LEN)
        last = positions[-1]
        read = model.added_tokens.norm(state)
        is_new = last - age[last] >= start
        write = model.added_tokens.initial_mD if is_new else read
        tokens = [("read", n) for n in range(M)] + [("text", n) for n in positions]
        tokens += [("write", n) for n in range(M)]
        x = torch.cat([read, model.embed(text_N[None, start : last + 1])[0], write])
        for number, layer in enumerate(model.layers):
            before = past[number][-mem_len:] if mem_len else []
            keys = [("past", n) for n, _ in before] + tokens
            rows = torch.stack([*(row for _, row in before), *x])
            past[number] += list(zip(positions, x[M : M + TGT_LEN].detach(), strict=True))
            outputs = []
            for index, query in enumerate(tokens):
                # A segment that ends with the query: keys that it does not see are left out.
                stop = len(before) + index + 1
                seen = [visible(keys[n], query, start, mem_len, age) for n in range(stop)]
                oldest = seen.index(True)
                assert all(seen[oldest:]), "what a token sees is one range of keys"
                outputs.append(attend(model, layer, rows[oldest:stop]))
            x = torch.stack(outputs)
        own = model.output(x)[M : M + TGT_LEN][None]
        nats.append(model.softmax(own, text_N[None, start + 1 : last + 2], model.table)[0])
        state = x[-M:]
    return torch.cat(nats)


@pytest.mark.parametrize("kind", ["tokens", "recurrent+tokens"])
@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True, "norm": "rmsnorm"}], ids=str)
@torch.no_grad()
def test_losses_are_those_of_attention_written_out(kind: str, options: dict[str, Any]) -> None:
    model = small_model(memory=kind, **options)
    mem_len = model.config.mem_len if kind == "recurrent+tokens" else 0
    expected = partial(by_hand, model, mem_len=mem_len)
    assert_losses(model, expected, tgt_len=TGT_LEN, num_segments=NUM_SEGMENTS)


@torch.no_grad()
def test_a_document_has_the_same_losses_wherever_in_a_segment_it_begins() -> None:
    """Until its second segment; from there on it depends on where segments end."""
    model, text_BN = small_model(memory="tokens"), random_text(1, 2 * TGT_LEN + 1)
    results = []
    for shift in range(TGT_LEN):
        padded_BN = torch.cat([random_text(1, shift, seed=shift + 1), text_BN], dim=1)
        age_BN = torch.tensor([[*range(5, 5 + shift), *range(2 * TGT_LEN)]])
        nats_BN, _ = model(
            padded_BN[:, :TGT_LEN], padded_BN[:, 1 : TGT_LEN + 1], age_BN[:, :TGT_LEN],
            model.empty_memory(1),
        )  # fmt: skip
        results.append(nats_BN[0, shift:])
    for shift, nats_N in enumerate(results):
        assert_close(nats_N, results[0][: TGT_LEN - shift])


@torch.no_grad()
def test_a_model_in_bf16_reads_its_fp32_state() -> None:
    model = small_model(memory="tokens", pre_lnorm=True).to(torch.bfloat16)
    text_BN = random_text(2, TGT_LEN + 1)
    columns = text_BN[:, :-1], text_BN[:, 1:], torch.arange(TGT_LEN).expand(2, -1)
    _, state = model(*columns, model.empty_memory(2))
    nats_BT, state = model(*columns, state)
    assert nats_BT.isfinite().all()
    assert state.tensors()["tokens"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["tokens", "recurrent+tokens"])
def test_a_run_that_would_not_train_what_is_written_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"needs training\.backprop_segments of at least 2"):
        load_run_config(TINY, [f"model.memory={kind}"])
    load_run_config(TINY, [f"model.memory={kind}", "training.backprop_segments=3"])
