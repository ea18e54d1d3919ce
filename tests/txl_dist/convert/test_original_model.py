"""Conversion to the original's names and back loses nothing."""

import pytest
import torch

from tests.support.small_models import small_model
from txl_dist.convert.original_model import from_original, original_config, to_original
from txl_dist.errors import ConfigError

OPTIONS = [
    {},
    {"tie_weight": False, "n_layer": 3},
    {"d_embed": 3},
    {"d_embed": 3, "tie_projs": (True,)},
    {"d_embed": 3, "tie_weight": False, "pre_lnorm": True},
    {"untie_r": True},
    {"cutoffs": (2, 7)},
    {"cutoffs": (2, 7), "tie_weight": False, "d_embed": 3},
    {"cutoffs": (2, 7), "div_val": 2, "tie_projs": (False, True, True)},
    {"cutoffs": (4,), "div_val": 2, "tie_weight": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_conversion_and_its_inverse_restore_the_weights(options: dict) -> None:
    model = small_model(**options)
    original = to_original(model.state_dict(), model.config)
    restored = from_original(original, model.config)
    assert set(restored) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        assert torch.equal(restored[name], weight), name


OTHER_BLOCKS: list[dict] = [
    {"norm": "rmsnorm"},
    {"pre_lnorm": True, "final_norm": True},
    {"qk_norm": True},
    {"qkv_biases": True},
    {"scale_embedding": False},
    {"feed_forward": "relu2"},
    {"biases": False},
    {"memory": "tokens"},
    {"mem_shares": (0.4, 1.0)},
    {"distance_encoding": "rotary"},
]


@pytest.mark.parametrize("options", OTHER_BLOCKS, ids=str)
def test_a_block_that_the_original_does_not_have_is_refused_by_name(options: dict) -> None:
    original = to_original(small_model().state_dict(), small_model().config)
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"^{name}="):
        from_original(original, small_model(**options).config)
    with pytest.raises(ConfigError, match=f"config.json: {name}="):
        original_config({"n_token": 11, name: value}, origin="config.json")


def test_queries_keys_and_values_are_concatenated_in_this_order() -> None:
    model = small_model()
    attention = model.layers[1].attention
    qkv = to_original(model.state_dict(), model.config)["layers.1.dec_attn.qkv_net.weight"]
    width = 3 * 4
    assert torch.equal(qkv[:width], attention.query.weight)
    assert torch.equal(qkv[width:], attention.key_value.weight)


def test_the_originals_cluster_columns_are_reversed() -> None:
    model = small_model(cutoffs=(2, 7))
    model.softmax.cluster_bias.data = torch.tensor([1.0, 2.0])
    assert to_original(model.state_dict(), model.config)["crit.cluster_bias"].tolist() == [2, 1]


def test_names_the_original_repeats_for_tied_tensors_are_read_once() -> None:
    model = small_model(d_embed=3, tie_projs=(True,))
    original = to_original(model.state_dict(), model.config)
    repeated = original | {
        "crit.out_layers.0.weight": original["word_emb.emb_layers.0.weight"],
        "crit.out_projs.0": original["word_emb.emb_projs.0"],
    }
    model.load_state_dict(from_original(repeated, model.config))
