"""Recipes of the paper's datasets."""

from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers.recipes import RECIPES, fixed_split


def test_the_fixed_split_is_the_papers_for_a_hundred_million() -> None:
    parts = fixed_split(100_000_000)
    assert parts["train"] == (0, 90_000_000)
    assert parts["valid"] == (90_000_000, 95_000_000)
    assert parts["test"] == (95_000_000, 100_000_000)
    assert fixed_split(20)["test"] == (19, 20)
    with pytest.raises(ValueError, match="20"):
        fixed_split(19)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_implies_its_tokenizer(name: str) -> None:
    settings, recipe = PrepareSettings(recipe=name), RECIPES[name]
    assert settings.tokenizer == recipe.tokenizers[0]
    assert settings.min_freq == recipe.min_freq
    assert (settings.min_freq == 3) == (name == "lm1b"), "the rule of the benchmark"
    given = settings.model_copy(update={"tokenizer": recipe.tokenizers[-1], "min_freq": None})
    assert PrepareSettings.model_validate(given.model_dump()) == given, "what is given stays"


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_a_text_of_another_size_than_the_published_one_is_noted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("the text " * 7)
    notes: list[str] = []
    prepare_dataset(
        [tmp_path / name], tmp_path / "out", PrepareSettings(recipe=name), note=notes.append
    )
    assert any(
        f"{name} as published has 100,000,000 bytes, this input has 63" in line for line in notes
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_refuses_other_tokenizers(name: str) -> None:
    legal = RECIPES[name].tokenizers
    assert PrepareSettings(tokenizer=legal[0], recipe=name).recipe == name
    with pytest.raises(ValueError, match=f"{name} is for tokenizer {legal[0]}"):
        PrepareSettings(tokenizer="bpe", vocab_size=300, recipe=name)
