"""Both ends of the model: what they share, what they compute, and targets that do not count."""

import pytest
import torch
from torch.testing import assert_close

from data_pipeline import segments
from tests.small_models import random_text, small_model
from txl_dist.model.tokens import IGNORED

ENDS = [
    {"tie_weight": tie_weight, "d_embed": d_embed, "tie_projection": tie_projection}
    for tie_weight in (True, False)
    for d_embed, tie_projection in [(None, False), (3, False), (3, True)]
]
every_kind_of_end = pytest.mark.parametrize("options", ENDS, ids=str)


@every_kind_of_end
def test_only_what_is_not_shared_has_parameters_of_its_own(options: dict) -> None:
    model = small_model(**options)
    own = {name for name, _ in model.softmax.named_parameters()}
    expected = {"bias"}
    if not options["tie_weight"]:
        expected.add("weight")
    if options["d_embed"] and not options["tie_projection"]:
        expected.add("projection")
    assert own == expected
    assert (model.table.projection is not None) == (options["d_embed"] is not None)


@every_kind_of_end
def test_vectors_and_logits_are_those_of_the_written_out_matrices(options: dict) -> None:
    model, token_BT = small_model(**options), random_text(2, 5)
    model.softmax.bias.data.normal_()
    table, softmax, d_model = model.table, model.softmax, 6
    into = torch.eye(d_model).double() if table.projection is None else table.projection
    expected_BTD = torch.stack([into @ table.weight[i] for i in token_BT.flatten()])
    assert_close(table(token_BT), expected_BTD.view(2, 5, d_model) * d_model**0.5)

    hidden_BTD = torch.randn(2, 5, d_model, dtype=torch.float64)
    weight = table.weight if options["tie_weight"] else softmax.weight
    out_of = softmax.projection if softmax.projection is not None else into
    expected_BTV = hidden_BTD @ out_of @ weight.t() + softmax.bias
    assert_close(model.logits(hidden_BTD), expected_BTV)

    expected_BT = -expected_BTV.log_softmax(-1).gather(-1, token_BT[..., None])[..., 0]
    assert_close(softmax.nats(hidden_BTD, token_BT, table), expected_BT)


@every_kind_of_end
def test_an_ignored_target_costs_no_nats_and_no_gradient(options: dict) -> None:
    model, target_BT = small_model(**options), random_text(2, 5)
    ignored_BT = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    target_BT[ignored_BT] = IGNORED
    hidden_BTD = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    nats_BT = model.softmax.nats(hidden_BTD, target_BT, model.table)
    nats_BT.sum().backward()
    for where, zero in ((ignored_BT, True), (~ignored_BT, False)):
        assert ((nats_BT[where] == 0) == zero).all()
        assert ((hidden_BTD.grad[where] == 0).all(dim=-1) == zero).all()


def test_a_segment_without_targets_leaves_every_gradient_zero() -> None:
    model, text_BT = small_model(), random_text(2, 5)
    target_BT = torch.full_like(text_BT, IGNORED)
    nats_BT, _ = model(text_BT, target_BT, torch.zeros_like(text_BT), model.empty_memory(2))
    nats_BT.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_data_marks_unscored_targets_as_the_model_does() -> None:
    assert segments.IGNORED == IGNORED
