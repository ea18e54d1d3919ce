"""Embedding and softmax: values, shared parameters, ignored targets."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data_pipeline.streams import segments
from tests.support.small_models import VOCAB_SIZE, random_text, small_model
from txl_dist.model import devices, vocabulary
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.vocabulary import (
    IGNORED,
    ROW_MULTIPLE,
    copy_targets,
    select_targets,
)

OPTIONS = [
    {},
    {"tie_weight": False},
    {"d_embed": 3},
    {"d_embed": 3, "tie_projs": (True,), "tie_weight": False},
    {"cutoffs": (4, 9)},
    {"cutoffs": (4, 9), "d_embed": 3, "tie_projs": (False, True), "tie_weight": False},
    {"cutoffs": (4, 9), "div_val": 2},
    {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, True)},
    {"cutoffs": (4,), "div_val": 3, "tie_weight": False},
]
with_all_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def table_of(model: TransformerXL, token: int) -> tuple[int, int]:
    """The table that holds a token, and its row there."""
    for table, (start, stop) in enumerate(model.table.bounds):
        if start <= token < stop:
            return table, token - start
    raise AssertionError(token)


@with_all_options
def test_vectors_equal_a_lookup_per_token(options: dict) -> None:
    model, token_BT = small_model(**options), torch.arange(VOCAB_SIZE).view(1, -1)
    vectors_TD = model.table(token_BT)[0]
    for token in range(VOCAB_SIZE):
        table, row = table_of(model, token)
        vector = model.table.weights[table][row]
        if len(model.table.projections):
            vector = model.table.projections[table] @ vector
        assert_close(vectors_TD[token], vector * model.config.d_model**0.5)


@with_all_options
def test_log_probabilities_equal_the_equation_per_token(options: dict) -> None:
    model = small_model(**options)
    for parameter in model.softmax.parameters():
        parameter.data.normal_()
    hidden_D = torch.randn(6, dtype=torch.float64)
    logits_V = model.logits(hidden_D.view(1, 1, -1))[0, 0].log_softmax(dim=-1)
    assert_close(
        logits_V, torch.stack([log_probability(model, hidden_D, t) for t in range(VOCAB_SIZE)])
    )


def log_probability(model: TransformerXL, hidden_D: Tensor, token: int) -> Tensor:
    """log p(token) by the equation in adaptive_softmax.py."""
    bounds = model.softmax.bounds
    (cluster,) = [c for c, (start, stop) in enumerate(bounds) if start <= token < stop]
    scores = [score(model, hidden_D, 0, t) for t in range(*bounds[0])]
    if len(bounds) > 1:
        weight, bias = model.softmax.cluster_weight, model.softmax.cluster_bias
        scores += list(weight @ projected(model, hidden_D, 0) + bias)
    head = torch.stack(scores).log_softmax(dim=0)
    if cluster == 0:
        return head[token]
    tail = torch.stack([score(model, hidden_D, cluster, t) for t in range(*bounds[cluster])])
    return head[bounds[0][1] + cluster - 1] + tail.log_softmax(dim=0)[token - bounds[cluster][0]]


def score(model: TransformerXL, hidden_D: Tensor, cluster: int, token: int) -> Tensor:
    table, row = table_of(model, token)
    weights = model.table.weights if model.config.tie_weight else model.softmax.weights
    return weights[table][row] @ projected(model, hidden_D, cluster) + model.softmax.bias[token]


def projected(model: TransformerXL, hidden_D: Tensor, cluster: int) -> Tensor:
    config = model.config
    if not config.has_projection:
        return hidden_D
    if config.is_tied(cluster):
        return hidden_D @ model.table.projections[cluster if config.div_val > 1 else 0]
    return hidden_D @ model.softmax.projections[str(cluster)]


@with_all_options
def test_nats_are_the_negative_log_probabilities_in_token_order(options: dict) -> None:
    model, target_BT = small_model(**options), random_text(2, 5)
    hidden_BTD = torch.randn(2, 5, 6, dtype=torch.float64)
    log_probability_BTV = model.logits(hidden_BTD).log_softmax(dim=-1)
    expected_BT = -log_probability_BTV.gather(-1, target_BT[..., None])[..., 0]
    assert_close(model.softmax(hidden_BTD, target_BT, model.table), expected_BT)


@with_all_options
def test_tied_parameters_exist_once(options: dict) -> None:
    model, config = small_model(**options), small_model(**options).config
    assert (len(model.softmax.weights) == 0) == config.tie_weight
    tied = {str(cluster) for cluster in range(config.num_clusters) if config.is_tied(cluster)}
    assert not tied & set(model.softmax.projections)


@with_all_options
def test_an_ignored_target_has_no_nats_and_no_gradient(options: dict) -> None:
    model, target_BT = small_model(**options), random_text(2, 5)
    ignored_BT = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    target_BT[ignored_BT] = IGNORED
    hidden_BTD = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    nats_BT = model.softmax(hidden_BTD, target_BT, model.table)
    nats_BT.sum().backward()
    for selected_BT, is_zero in ((ignored_BT, True), (~ignored_BT, False)):
        assert ((nats_BT[selected_BT] == 0) == is_zero).all()
        assert ((hidden_BTD.grad[selected_BT] == 0).all(dim=-1) == is_zero).all()


@with_all_options
def test_every_parameter_has_a_gradient_for_any_targets(options: dict) -> None:
    """No target is scored and one token id is read; other parameters must have zero gradients."""
    model, text_BT = small_model(**options), torch.zeros(2, 5, dtype=torch.int64)
    target_BT = torch.full_like(text_BT, IGNORED)
    nats_BT, _ = model(text_BT, target_BT, torch.zeros_like(text_BT), model.empty_memory(2))
    nats_BT.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_data_and_model_mark_ignored_targets_alike() -> None:
    assert segments.IGNORED == IGNORED


@pytest.mark.parametrize("targets", ["mixed", "shortlist only", "last cluster only", "ignored"])
def test_rows_found_on_the_host_are_those_of_the_device(targets: str) -> None:
    bounds, generator = ((0, 4), (4, 9), (9, 11)), torch.Generator().manual_seed(1)
    low, high = {"mixed": (-1, 11), "shortlist only": (0, 4), "last cluster only": (9, 11)}.get(
        targets, (-1, 0)
    )
    target_BT = torch.randint(low, high, (3, 29), generator=generator)
    selected = select_targets(target_BT.flatten(), bounds)
    copied = copy_targets(target_BT, bounds, torch.device("cpu"))
    assert torch.equal(copied.head_N, selected.head_N)
    for (row_R, target_R), (padded_row_R, padded_target_R) in zip(
        selected.tails, copied.tails, strict=True
    ):
        num_rows = len(row_R)
        assert len(padded_row_R) % ROW_MULTIPLE == 0
        assert torch.equal(padded_row_R[:num_rows], row_R)
        assert torch.equal(padded_target_R[:num_rows], target_R)
        assert (padded_row_R[num_rows:] == 0).all()
        assert (padded_target_R[num_rows:] == IGNORED).all()
    assert vocabulary.IGNORED == IGNORED


@pytest.mark.parametrize("max_logits", [20, 2**29])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"div_val": 2},
        {"div_val": 2, "tie_projs": (False, True, True)},
        {"d_embed": 3, "tie_projs": (False, True), "tie_weight": False},
        {"biases": False},
    ],
)
def test_a_model_computes_the_same_as_on_a_gpu(
    options: dict[str, Any], max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and softmax on GPUs have other operations: run them on the CPU."""
    pytest.importorskip("triton")
    model = small_model(cutoffs=(4, 9), **options)
    assert (4 + 2) % vocabulary.HEAD_MULTIPLE, "the head is padded"
    text_BN = random_text(3, 9)
    text_BN[1, 5] = IGNORED

    def results() -> list[Tensor]:
        input_BT, age_BT = text_BN[:, :-1].clamp(min=0), torch.arange(8).expand(3, 8)
        memory = model.empty_memory(3)
        nats_BT, memory = model(input_BT, text_BN[:, 1:], age_BT, memory)
        gradients = torch.autograd.grad(nats_BT.square().sum(), [*model.parameters()])
        hidden_BTD, _ = model.hidden(input_BT, age_BT, memory)
        return [nats_BT, model.logits(hidden_BTD), *gradients]

    expected = results()
    monkeypatch.setattr(devices, "host_waits_for", lambda _: True)
    monkeypatch.setattr(devices, "to_device", lambda x, _: x)
    monkeypatch.setattr(vocabulary, "MAX_LOGITS", max_logits)
    for actual, of_the_cpu in zip(results(), expected, strict=True):
        assert_close(actual, of_the_cpu, rtol=1e-12, atol=1e-12)
