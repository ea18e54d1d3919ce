"""Requests of the harness: each has the score of one pass over its tokens, in any batch."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, train_tokenizer
from tests.support.small_models import read_stream, recorded_memory_lens, small_model
from tests.txl_dist.harness.small_harness_models import TGT_LEN, export, requests
from txl_dist.convert.stored_model import Reading, find_model, write_exported
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.generation.generate import generate_texts
from txl_dist.generation.text import Sampling, TextLimits
from txl_dist.harness import model as adapter_module
from txl_dist.harness.model import TransformerXLModel

BYTES = ByteTokenizer()
TEXT = "the cat sat\non the mat. the end\n"
PAIRS = [("", "the"), ("the cat", " sat"), (TEXT, "on"), ("the ", "mat"), ("a", " b" * 20)]


def tokenizer_of(kind: str, recipe: Any = None) -> Tokenizer:
    settings = PrepareSettings(tokenizer=kind, recipe=recipe, vocab_size=290)
    return train_tokenizer(settings, lambda: iter([TEXT * 3]))


TOKENIZERS = {
    "byte": lambda: BYTES,
    "char": lambda: tokenizer_of("char"),
    "word": lambda: tokenizer_of("word"),
    "bpe": lambda: tokenizer_of("bpe"),
    "word of wt103": lambda: tokenizer_of("word", "wt103"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("model") / "bytes", BYTES)


def log_likelihood(
    directory: Path, context: list[int], continuation: list[int], tgt_len: int = TGT_LEN
) -> float:
    """By the definition: nats of the continuation in one sequential pass with a `Memory`."""
    stored = find_model(directory)
    model, _ = stored.load(stored.config)
    tokens = torch.tensor([context + continuation])
    with torch.no_grad():
        nats_BN, _ = read_stream(model, tokens, tgt_len=tgt_len)
    return -float(nats_BN[0, len(context) - 1 :].sum())


@pytest.mark.parametrize(
    "kind",
    [
        "word of wt103",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("byte", "char", "word", "bpe")),
    ],
)
def test_each_pair_has_the_score_of_one_pass_over_its_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    directory = export(tmp_path / "model", tokenizer)
    results = [
        TransformerXLModel(directory, batch_size=size).loglikelihood(
            requests("loglikelihood", *PAIRS)
        )
        for size in (1, 8)
    ]
    marks = [tokenizer.end_of_document] if tokenizer.opens_documents else []
    prefix = marks or tokenizer.encode("\n").tolist()
    for number, (context, continuation) in enumerate(PAIRS):
        # Blanks at the end of a context belong to the continuation, as the harness defines it.
        stripped = context.rstrip()
        whole = [*marks, *tokenizer.encode(context + continuation).tolist()]
        first = [*marks, *tokenizer.encode(stripped).tolist()] if context else marks
        context_ids, continuation_ids = first or prefix, whole[len(first) :]
        expected = log_likelihood(directory, context_ids, continuation_ids)
        for result in results:
            assert result[number][0] == pytest.approx(expected, rel=1e-5)
    assert results[0] == [(pytest.approx(nats), greedy) for nats, greedy in results[1]]


def test_greedy_is_what_greedy_decoding_gives(tmp_path: Path) -> None:
    """With a memory that holds the text: else it depends on where segments begin."""
    directory = export(tmp_path / "model", tokenizer_of("char"), mem_len=30)
    model = TransformerXLModel(directory, batch_size=2)
    greedy = {"until": [], "max_gen_toks": 9, "do_sample": False}
    contexts = ["the", "on the mat", "cat sat on"]
    texts = model.generate_until(requests("generate_until", *((c, greedy) for c in contexts)))
    pairs = [(context, text) for context, text in zip(contexts, texts, strict=True)]
    wrong = [(context, text[:-1] + ("a" if text[-1] != "a" else "c")) for context, text in pairs]
    results = model.loglikelihood(requests("loglikelihood", *pairs, *wrong))
    assert [is_greedy for _, is_greedy in results] == [True] * len(pairs) + [False] * len(wrong)


def test_a_document_is_read_through_the_memory(exported: Path) -> None:
    model = TransformerXLModel(exported, batch_size=2)
    documents = [TEXT, "", TEXT[:3], TEXT * 2]
    rolling = model.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in documents))
    )
    for document, nats in zip(documents, rolling, strict=True):
        ids = list(document.encode())
        expected = log_likelihood(exported, [BYTES.end_of_document], ids) if ids else 0
        assert nats == pytest.approx(expected, rel=1e-5)


def test_a_memory_is_as_long_as_the_request_before_its_last_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without a window has a memory of all its positions, whatever the request is."""
    directory = export(tmp_path / "model", BYTES, mem_len=5000, distance_encoding="rotary")
    model, lens = TransformerXLModel(directory), recorded_memory_lens(monkeypatch)
    for text, expected in (("abc", 0), ("abcdefg" * 3, 18)):
        lens.clear()
        (nats,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
        assert {*lens} == {expected}
        ids = [*text.encode()]
        expected_nats = log_likelihood(directory, [BYTES.end_of_document], ids)
        assert nats == pytest.approx(expected_nats, rel=1e-5)


@pytest.mark.parametrize(
    "tgt_len", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 14, 500))]
)
def test_or_without_memory_in_windows_as_the_harness_defines_them(
    exported: Path, tgt_len: int
) -> None:
    """Every token is scored once, and the last window is as long as the others."""
    model = TransformerXLModel(exported, mem_len=0, tgt_len=tgt_len, batch_size=3)
    (rolling,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT,)))
    ids, expected, scored = [BYTES.end_of_document, *TEXT.encode()], 0.0, 1
    while scored < len(ids):
        stop = min(scored + tgt_len, len(ids))
        start = min(scored - 1, stop - tgt_len - 1) if scored > 1 else 0
        expected += log_likelihood(exported, ids[start:scored], ids[scored:stop], tgt_len)
        scored = stop
    assert rolling == pytest.approx(expected, rel=1e-5)


def test_windows_cut_contexts_at_their_beginning(exported: Path) -> None:
    model = TransformerXLModel(exported, mem_len=0, tgt_len=9)
    ((nats, _),) = model.loglikelihood(requests("loglikelihood", (TEXT, "and on")))
    ids = list((TEXT + "and on").encode())
    # The line end of the context belongs to the continuation.
    assert nats == pytest.approx(log_likelihood(exported, ids[-10:-7], ids[-7:], 9), rel=1e-5)


def test_a_model_is_scored_in_windows_only_if_it_has_no_memory(tmp_path: Path) -> None:
    for number, options in enumerate(({"distance_encoding": "absolute"}, {})):
        directory = export(tmp_path / str(number), BYTES, mem_len=0, **options)
        model = TransformerXLModel(directory)
        assert not model.has_memory
        ((nats, _),) = model.loglikelihood(requests("loglikelihood", (TEXT[:-1], "x y")))
        ids = list((TEXT[:-1] + "x y").encode())[-7:]
        assert nats == pytest.approx(log_likelihood(directory, ids[:-3], ids[-3:]), rel=1e-5)
    directory = export(tmp_path / "tokens", BYTES, memory="tokens", mem_len=0)
    assert TransformerXLModel(directory).has_memory, "although its mem_len is 0"
    with pytest.raises(ConfigError, match="mem_len=64 has no effect"):
        TransformerXLModel(directory, mem_len=64)


@pytest.mark.slow
def test_texts_are_those_of_txl_generate(exported: Path) -> None:
    contexts, sampled = ["x", "the cat", TEXT], {"do_sample": True, "temperature": 0.7, "top_k": 9}
    arguments = [(c, {"until": ["e", ""], "max_gen_toks": 30, **sampled}) for c in contexts]
    arguments.append(("x", {"max_gen_toks": 3}))
    arguments.append(("x", {"until": "\n"}))
    stored = find_model(exported)
    network, tokenizer = stored.load_with_tokenizer()
    for batch_size in (1, 8):
        model = TransformerXLModel(exported, batch_size=batch_size, seed=4, max_gen_toks=20)
        texts = model.generate_until(requests("generate_until", *arguments))
        for number, (context, options) in enumerate(arguments):
            free = options.get("do_sample", False)
            until = [string for string in options.get("until", []) if string]
            (expected,) = generate_texts(
                network,
                tokenizer,
                [context],
                tgt_len=TGT_LEN,
                sampling=Sampling(temperature=0.7, top_k=9) if free else Sampling(temperature=0),
                limits=TextLimits(max_tokens=options.get("max_gen_toks", 20), stop=tuple(until)),
                seed=4 + number,
            )
            assert texts[number] == expected.text


def test_requests_that_cannot_be_scored_are_refused_by_name(exported: Path, tmp_path: Path) -> None:
    model = TransformerXLModel(exported, mem_len=0, tgt_len=5)
    with pytest.raises(DataError, match=r"task local, document 1, .* has 6 tokens.*tgt_len=5"):
        model.loglikelihood(requests("loglikelihood", ("a", "12345"), ("a", "123456")))
    with pytest.raises(DataError, match=r"document 0, .* '' has no token"):
        model.loglikelihood(requests("loglikelihood", ("a", "")))
    with pytest.raises(ConfigError, match=r"document 0, .*num_beams are not supported"):
        model.generate_until(requests("generate_until", ("a", {"num_beams": 3})))


def test_scores_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = small_model(vocab_size=BYTES.vocab_size, mem_len=8).float()
    with torch.no_grad():
        model.layers[1].attention.query.weight.fill_(3e38)  # products overflow
    write_exported(tmp_path / "model", model, BYTES, Reading(tgt_len=TGT_LEN))
    # The harness names a GPU also on machines without one.
    adapter = TransformerXLModel(tmp_path / "model", device="cuda:0")
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        adapter.loglikelihood(requests("loglikelihood", ("a", "b")))


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    spec = spec_from_file_location("adapter_without_lm_eval", adapter_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ConfigError, match=r"pip install 'txl-dist\[lm-eval\]'"):
        spec.loader.exec_module(module_from_spec(spec))


def test_words_that_a_model_does_not_know_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = export(tmp_path / "model", tokenizer_of("word"))
    model = TransformerXLModel(directory)
    assert model.get_model_info()["unknown_symbols"] == 0
    generation = {"until": ["cat", "dog"], "max_gen_toks": 2}
    calls: dict[str, tuple[list[tuple], str]] = {
        "loglikelihood": ([("the dog", " sat"), ("the", " cat")], "1 symbol .*'dog'"),
        "loglikelihood_rolling": ([("the dog",), ("a cat",)], "2 symbols .*'dog', 'a'"),
        "generate_until": ([("the dog", generation)], "1 symbol .*'dog'"),
    }
    for name, (arguments, expected) in calls.items():
        caplog.clear()
        getattr(model, name)(requests(name, *arguments))
        (message,) = caplog.messages
        assert re.match(f"{name}: {expected}$", message), message
    assert model.get_model_info()["unknown_symbols"] == 4
    caplog.clear()
    model.loglikelihood(requests("loglikelihood", ("the", " cat <unk>")))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": "auto"}, "batch_size: Input should be a valid integer"),
        ({"mem_len": -1}, "mem_len: Input"),
        ({"precision": "fp16"}, "precision"),
        ({"strict": True}, "strict: Extra"),
    ],
)
def test_model_arguments_are_checked(exported: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TransformerXLModel(exported, **options)


def test_a_model_whose_documents_have_no_mark_needs_a_prefix(tmp_path: Path) -> None:
    letters = train_tokenizer(
        PrepareSettings(tokenizer="char", recipe="text8"), lambda: iter(["the cat"])
    )
    directory = export(tmp_path / "model", letters)
    with pytest.raises(ConfigError, match=r"prefix='\\n' is not in the vocabulary"):
        TransformerXLModel(directory)
    model = TransformerXLModel(directory, prefix=" ")
    assert model.prefix_token_id == letters.encode(" ")[0]
