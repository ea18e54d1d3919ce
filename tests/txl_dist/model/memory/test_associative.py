"""`model.memory: associative`: the equations, row by row, and an exact reset within a segment."""

from copy import deepcopy
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
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.model.memory.associative import Reader, Writer, features
from txl_dist.model.transformer_xl import TransformerXL

B, L, D, K, NUM_WRITTEN = 2, 3, 6, 5, 4
CONFIG = ModelConfig(
    memory="associative", n_layer=L, d_model=D, d_memory_key=K, memory_tokens=NUM_WRITTEN
)


def features_by_index(y: list[float]) -> Tensor:
    r = [max(value, 0.0) for value in y] + [max(-value, 0.0) for value in y]
    products = [r[n] * r[n - shift] for shift in (1, 2, 3) for n in range(len(r))]
    return torch.tensor(products).double() / sum(x * x for x in products) ** 0.5


def test_features_are_those_of_the_equations() -> None:
    y = torch.randn(4, K).double()
    for row in range(4):
        assert_close(features(y)[row], features_by_index(y[row].tolist()))


def test_reading_and_writing_follow_the_equations() -> None:
    """Two lanes read five segments; a document begins in the third segment of lane 1."""
    torch.manual_seed(0)
    kind = memory_kind(CONFIG)
    state = kind.empty(B, dtype=torch.float64)
    value = [[torch.zeros(6 * K, D).double() for _ in range(L)] for _ in range(B)]
    weight = [[torch.zeros(6 * K).double() for _ in range(L)] for _ in range(B)]
    age_B = torch.tensor([7, 3])
    for segment in range(5):
        age_BT = age_B[:, None] + torch.arange(2)
        if segment == 2:
            age_BT[1, 1] = 0
        written = []
        for layer in range(L):
            writer = Writer(CONFIG).double()
            x_BTD = torch.randn(B, 2 + NUM_WRITTEN, D).double()
            written.append(writer(x_BTD).detach())
            for lane in range(B):
                kept = CONFIG.memory_decay if age_BT[lane, -1] > 1 else 0.0
                value[lane][layer] *= kept
                weight[lane][layer] *= kept
                for x_D in x_BTD[lane, -NUM_WRITTEN:]:
                    key = features_by_index(writer.key(x_D).tolist())
                    known = weight[lane][layer] @ key
                    old = value[lane][layer].T @ key / max(float(known), 1.0)
                    change = torch.sigmoid(writer.strength(x_D)) * (writer.value(x_D) - old)
                    value[lane][layer] += torch.outer(key, change.detach())
                    weight[lane][layer] += min(max(1 - float(known), 0), 1) * key
        state = state.after(written, age_BT)
        age_B = age_BT[:, -1] + 1
        for layer in range(L):
            value_BFD, weight_BF = state.past(layer, torch.zeros(B, 1, D).double())
            for lane in range(B):
                assert_close(value_BFD[lane], value[lane][layer])
                assert_close(weight_BF[lane], weight[lane][layer])


class _Context:
    def __init__(self, reach_BT: Tensor) -> None:
        self.visibility = self
        self.reach_BT = reach_BT


def test_only_tokens_of_a_document_that_began_before_the_segment_read() -> None:
    torch.manual_seed(1)
    reader, x_BTD = Reader(CONFIG).double(), torch.randn(1, 4, D).double()
    value_FD, weight_F = torch.randn(6 * K, D).double(), torch.rand(6 * K).double()
    context = _Context(torch.tensor([[9, 10, 0, 1]]))
    read_BTD, keys_BMD = reader(x_BTD, (value_FD[None], weight_F[None]), context)
    for token in range(2):
        query = features_by_index(reader.query(x_BTD[0, token]).tolist())
        expected = x_BTD[0, token] + value_FD.T @ query / max(float(weight_F @ query), 1.0)
        assert_close(read_BTD[0, token], expected)
    assert torch.equal(read_BTD[0, 2:], x_BTD[0, 2:])
    assert keys_BMD.shape == (1, 0, D), "attention sees nothing of it"


def by_hand(model: TransformerXL, text_N: Tensor, age: list[int], tgt_len: int) -> Tensor:
    """Nats of one lane: what is read and written, and attention, computed token by token."""
    config, nats = model.config, []
    width, num_features = config.d_model, 6 * config.d_memory_key
    value_FD = [torch.zeros(num_features, width).double() for _ in model.layers]
    weight_F = [torch.zeros(num_features).double() for _ in model.layers]
    attention = deepcopy(model.layers)
    for layer in attention:
        layer.memory_reader = None
    for start in range(0, len(age), tgt_len):
        stop = start + tgt_len
        began = [at - age[at] for at in range(start, stop)]  # where the document of a token does
        began += [began[-1]] * config.memory_tokens
        first_TD = x_TD = torch.cat(
            [model.embed(text_N[None, start:stop])[0], model.added_tokens.initial_mD]
        )
        inputs = []
        for number, layer in enumerate(model.layers):
            x_TD = model.layer_input(number, x_TD, first_TD)
            inputs.append(x_TD)
            rows = [*x_TD]
            for token, x_D in enumerate(x_TD):
                if began[token] < start:
                    query = features_by_index(layer.memory_reader.query(x_D).tolist())
                    known = max(float(weight_F[number] @ query), 1.0)
                    rows[token] = x_D + value_FD[number].T @ query / known
            x_TD = torch.stack(
                [
                    attend(
                        model,
                        attention[number],
                        torch.stack(rows[max(0, began[token] - start) : token + 1]),
                    )
                    for token in range(len(rows))
                ]
            )
        own_1TD = model.output(x_TD)[None, :tgt_len]
        nats.append(model.softmax(own_1TD, text_N[None, start + 1 : stop + 1], model.table)[0])
        for number, written_TD in enumerate([*inputs[1:], x_TD]):
            writer = model.layers[number].memory_writer
            kept = config.memory_decay if began[-1] < start else 0.0
            value_FD[number] *= kept
            weight_F[number] *= kept
            for x_D in written_TD[tgt_len:]:
                key = features_by_index(writer.key(x_D).tolist())
                known = float(weight_F[number] @ key)
                old_D = value_FD[number].T @ key / max(known, 1.0)
                change_D = torch.sigmoid(writer.strength(x_D)) * (writer.value(x_D) - old_D)
                value_FD[number] += torch.outer(key, change_D)
                weight_F[number] += min(max(1 - known, 0), 1) * key
    return torch.cat(nats)


@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True, "residual_scalars": True}], ids=str)
@torch.no_grad()
def test_losses_are_those_of_the_equations_written_out(options: dict[str, Any]) -> None:
    """With residual scalars a layer's writer reads the input of the next layer."""
    model = small_model(memory="associative", **options)
    assert_losses(model, partial(by_hand, model, tgt_len=4), tgt_len=4, num_segments=5)


def test_what_was_written_is_read_with_its_key() -> None:
    """One key in an empty matrix gives beta v back."""
    state = memory_kind(CONFIG).empty(1, dtype=torch.float64)
    key, value = features(torch.randn(K).double()), torch.randn(D).double()
    row = torch.cat([key, value, torch.tensor([0.7]).double()])[None, None]
    state = state.after([row] * L, torch.tensor([[4, 5]]))
    value_BFD, weight_BF = state.past(0, torch.zeros(1, 1, D).double())
    assert_close(value_BFD[0].T @ key, 0.7 * value)
    assert_close(weight_BF[0] @ key, torch.tensor(1.0).double())


def test_equal_keys_of_one_segment_do_not_overshoot() -> None:
    """A key that was written once, then by all tokens of a segment with another value."""
    state = memory_kind(CONFIG).empty(1, dtype=torch.float64)
    keys = features(torch.randn(NUM_WRITTEN, K).double())
    for segment in range(9):
        value_D = torch.randn(D).double()
        keys_mF = keys if segment == 0 else keys[:1].expand(NUM_WRITTEN, -1)
        columns = keys_mF, value_D.expand(NUM_WRITTEN, -1), torch.ones(NUM_WRITTEN, 1).double()
        age_BT = torch.tensor([[4 + segment, 5 + segment]])
        state = state.after([torch.cat(columns, dim=1)[None]] * L, age_BT)
    value_BFD, weight_BF = state.past(0, torch.zeros(1, 1, D).double())
    read_D = value_BFD[0].T @ keys[0] / max(float(weight_BF[0] @ keys[0]), 1.0)
    assert_close(read_D, value_D, rtol=0, atol=1e-3)


def test_a_key_that_nothing_was_written_with_reads_little() -> None:
    """Two keys that are nearly equal get opposite values, so the matrix has large differences."""
    state = memory_kind(CONFIG).empty(1, dtype=torch.float64)
    first = torch.zeros(6 * K).double()
    first[0] = 1.0
    second = first.clone()
    second[0], second[1] = 0.98, 0.2
    for segment in range(200):
        keys_mF = torch.stack([first, second] * (NUM_WRITTEN // 2))
        sign_m1 = torch.tensor([[1.0], [-1.0]] * (NUM_WRITTEN // 2)).double()
        columns = keys_mF, sign_m1.expand(-1, D), torch.ones(NUM_WRITTEN, 1).double()
        age_BT = torch.tensor([[4 + segment, 5 + segment]])
        state = state.after([torch.cat(columns, dim=1)[None]] * L, age_BT)
    value_BFD, weight_BF = state.past(0, torch.zeros(1, 1, D).double())
    other = torch.zeros(6 * K).double()
    other[1] = 1.0
    read_D = value_BFD[0].T @ other / max(float(weight_BF[0] @ other), 1.0)
    assert float(read_D.abs().max()) < 20


@torch.no_grad()
def test_the_state_is_fp32_in_a_run_with_bf16() -> None:
    model = small_model(memory="associative").float()
    text_BN = random_text(2, 9)
    age_BT = torch.arange(8).expand(2, -1)
    states = []
    for is_bf16 in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            columns = text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(2)
            _, state = model(*columns, None, 2)
        states.append(state.tensors()["values"])
    assert states[1].dtype == torch.float32
    assert_close(states[1], states[0], rtol=0.1, atol=0.02)
    assert (
        memory_kind(CONFIG).empty(1, dtype=torch.bfloat16).past(0, text_BN)[0].dtype
        == torch.float32
    )


@pytest.mark.parametrize("kind", ["tokens", "recurrent+tokens", "associative"])
def test_a_run_that_would_not_train_what_is_written_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"needs training\.backprop_segments of at least 2"):
        load_run_config(TINY, [f"model.memory={kind}"])
    load_run_config(TINY, [f"model.memory={kind}", "training.backprop_segments=3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"same_length": True}, "same_length=true is not supported by memory=associative"),
        ({"distance_encoding": "absolute"}, "use another distance_encoding"),
        ({"distance_encoding": "absolute", "mem_len": 0}, "use another distance_encoding"),
        ({"memory_tokens": 0}, "memory_tokens=0 must be at least 1"),
        ({"memory_decay": 1.5}, r"memory_decay=1\.5 must be above 0 and at most 1"),
        ({"mem_shares": (0.5, 1.0)}, "mem_shares is not supported by memory=associative"),
    ],
)
def test_other_settings_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(memory="associative", **options)
