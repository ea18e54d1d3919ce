"""One number in three programs: txl eval, a loop over transformers, and lm-evaluation-harness."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from data_pipeline.tokenizers import ByteTokenizer
from tests.support.commands import run_txl
from tests.support.small_models import MODERN, small_model
from txl_dist.convert.hub import write_for_transformers
from txl_dist.convert.stored_model import Reading, write_exported
from txl_dist.evaluation.distributed import evaluate
from txl_dist.evaluation.spec import evaluation_spec

DOCUMENTS = ["def f(x):\n    return x\n", "ä long line. " * 9, "end\n"]
WINDOW = 5


def nats_of_loop(directory: Path, documents: list[str]) -> tuple[float, float]:
    """Of whole documents, with and without the token that ends all but the last."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ends, nats = 0.0, 0.0
    for number, document in enumerate(documents):
        ids = tokenizer(tokenizer.bos_token + document).input_ids
        has_end = number + 1 < len(documents)
        targets = torch.tensor(ids[1:] + [tokenizer.eos_token_id] * has_end)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, : len(targets)]
        scores = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        nats -= float(scores[: len(ids) - 1].double().sum())
        ends -= float(scores[len(ids) - 1 :].double().sum())
    return nats + ends, nats


def test_three_programs_give_one_number(tmp_path: Path) -> None:
    source, data = tmp_path / "texts.jsonl", tmp_path / "data"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    code, output = run_txl("prepare", f"train={source}", "--out", data)
    assert code == 0, output
    options = MODERN["modern"] | {"same_length": True, "mem_len": WINDOW, "init_std": 0.2}
    model = small_model(vocab_size=257, **options).float()
    own, out = tmp_path / "own", tmp_path / "out"
    write_exported(own, model, ByteTokenizer(), Reading(tgt_len=7, reset="document"))
    write_for_transformers(out, model, ByteTokenizer(), 7, window=WINDOW, card=None)
    spec = evaluation_spec(own, data, split="train")
    score = evaluate(spec).sums.nats
    with_ends, without = nats_of_loop(out, DOCUMENTS)
    assert score == pytest.approx(with_ends, rel=1e-5)
    harness = HFLM(pretrained=str(out), device="cpu", batch_size=1, dtype="float32")
    requests = [Instance("loglikelihood_rolling", {}, (text,), idx=0) for text in DOCUMENTS]
    assert -sum(harness.loglikelihood_rolling(requests)) == pytest.approx(without, rel=1e-5)
