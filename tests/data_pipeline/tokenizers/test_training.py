"""Choosing the tokenizer of a dataset, recipes, and counting symbols in parts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers import ready_tokenizer, tokenizer_of_counts, train_tokenizer
from data_pipeline.tokenizers.training import RECIPES, count_symbols, sum_of_counts
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, FILE, LM1B, TOKENIZER, WORD


def test_the_tokenizer_file_of_a_dataset_is_used_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_json())
    assert ready_tokenizer(FILE, path).digest == TOKENIZER.digest


@pytest.mark.parametrize(
    "content",
    ["[]", '{"model": {}}', '{"model": {"type": "BPE", "vocab": {"a": 4}, "merges": []}}'],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError):
        ready_tokenizer(FILE, path)


def test_a_file_is_given_exactly_for_kind_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file"):
        ready_tokenizer(FILE)
    with pytest.raises(ConfigError, match="byte"):
        ready_tokenizer(PrepareSettings(), tmp_path / "x")


@pytest.mark.parametrize("settings", [CHAR, WORD, LM1B])
@given(texts=st.lists(st.text(alphabet="ab \n€"), max_size=7), cut=st.integers(0, 7))
def test_merged_counts_are_the_counts_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    settings: PrepareSettings,
    texts: list[str],
    cut: int,
) -> None:
    folder = tmp_path_factory.mktemp("counts")
    files = [folder / "first", folder / "second"]
    for file, part in zip(files, (texts[:cut], texts[cut:]), strict=True):
        file.write_text(canonical_json(count_symbols(settings, part)))
    merged = sum_of_counts(files)
    assert merged == count_symbols(settings, iter(texts)) == sum_of_counts(reversed(files))
    from_texts = train_tokenizer(settings, lambda: iter(texts))
    assert tokenizer_of_counts(settings, merged).digest == from_texts.digest


# --- recipes --------------------------------------------------------------------------------------


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
