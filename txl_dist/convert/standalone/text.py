"""Loading, tokenizer and generation of the standalone file. Nothing of txl_dist is in here."""

import argparse
import hashlib
import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_dist.convert.standalone.model import TransformerXL

# --- files ----------------------------------------------------------------------------------------


def load(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> "tuple[TransformerXL, Tokenizer | None]":
    """The model, and its tokenizer if there is one. Raises ValueError for damaged files."""
    directory = Path(directory)
    content = json.loads((directory / "config.json").read_text("utf-8"))
    if (content.get("format"), content.get("version")) != ("txl-model", 1):
        raise ValueError(f"{directory / 'config.json'} is not that of a model of this file")
    tensors = read_safetensors(directory / "model.safetensors", content["weights_sha256"])
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    path = directory / "txl_tokenizer.json"
    tokenizer = Tokenizer(json.loads(path.read_text("utf-8"))) if path.exists() else None
    return TransformerXL(content["model"], moved, content["reading"]["tgt_len"]), tokenizer


def read_safetensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file: the length of its header, the header as JSON, then fp32 numbers."""
    raw = bytearray(path.read_bytes())
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ValueError(f"{path} has sha256 {found}, config.json says {sha256}: it is damaged")
    start, tensors = 8 + int.from_bytes(raw[:8], "little"), {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            if entry["dtype"] != "F32":
                raise ValueError(f"{path}: {name} is {entry['dtype']}, expected F32")
            count, offset = math.prod(entry["shape"]), start + entry["data_offsets"][0]
            flat = torch.frombuffer(raw, dtype=torch.float32, count=count, offset=offset)
            tensors[name] = flat.view(entry["shape"])
    return tensors


# --- text -----------------------------------------------------------------------------------------


class Tokenizer:
    """Text to ids and back: bytes, characters, words, numbers, or the library `tokenizers`."""

    def __init__(self, content: dict[str, Any]) -> None:
        """`content`: that of txl_tokenizer.json."""
        self.kind, self.library = content["type"], None
        if "tokenizer" in content:
            from tokenizers import Tokenizer as Library  # pip install tokenizers

            self.library = Library.from_str(json.dumps(content["tokenizer"]))
        self.symbols = content.get("symbols") or content.get("names") or []
        self.id_of = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.end: int = content.get("end_of_document", len(self.symbols))
        """The id of the end of documents, with which they also begin if `opens_documents`."""
        self.opens_documents: bool = content.get("opens_documents", True)
        self.opens_lines = content.get("lines") == "both"

    def encode(self, text: str) -> list[int]:
        if self.library is not None:
            return list(self.library.encode(text, add_special_tokens=False).ids)
        if self.kind == "byte":
            return [*text.encode()]
        if self.kind == "char":
            return [self.id_of.get(character, self.id_of[""]) for character in text]
        if self.kind == "ids":
            return [self.id_of[name] if name in self.id_of else int(name) for name in text.split()]
        *lines, last = text.split("\n")
        begin = ["\n"] if self.opens_lines else []
        words = [word for line in lines for word in (*begin, *line.split(), "\n")]
        words += [*begin, *last.split()] if last.split() else []
        return [self.id_of.get(word, self.id_of["<unk>"]) for word in words]

    def decode(self, ids: list[int]) -> str:
        ids = [number for number in ids if number != self.end]
        if self.library is not None:
            return str(self.library.decode(ids, skip_special_tokens=False))
        if self.kind == "byte":
            return bytes(ids).decode("utf-8", errors="replace")
        if self.kind == "char":
            return "".join(self.symbols[number] or "\ufffd" for number in ids)
        if self.kind == "ids":
            return " ".join((self.symbols[n : n + 1] or [""])[0] or str(n) for n in ids)
        line_ends = r"( ?\n ?)+" if self.opens_lines else r" ?\n ?"
        text = re.sub(line_ends, "\n", " ".join(self.symbols[number] for number in ids))
        return text.lstrip("\n") if self.opens_lines else text


@torch.no_grad()
def generate_ids(
    model: TransformerXL, prompt: list[int], *, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, seed: int = 0,
) -> Iterator[int]:  # fmt: skip
    """Ids that follow the ids of a prompt, without end. Temperature 0: always the most likely."""
    c, device, size = model.c, model.like.device, model.segment_len
    has_memory, generator = model.kind.num_added > 0 or any(model.kind.mem_lens), torch.Generator()
    generator.manual_seed(seed)
    memory, pending = model.empty_memory(1), [*prompt]
    while True:
        while has_memory and len(pending) > size:
            _, memory = model(torch.tensor([pending[:size]], device=device), memory)
            del pending[:size]
        pending = pending[-size:]
        # Absolute positions count from the end of a whole segment.
        padding = [0] * (size - len(pending)) if c.distance_encoding == "absolute" else []
        logits, after = model(torch.tensor([pending + padding], device=device), memory)
        logits_V = logits[0, len(pending) - 1].cpu()
        # What is written at the end of a segment needs the whole segment: read it again till then.
        if has_memory and (len(pending) == size or not model.kind.num_added):
            memory, pending = after, []
        pending.append(draw(logits_V, temperature, top_k, top_p, generator))
        yield pending[-1]


def draw(
    logits_V: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Any
) -> int:
    """An id, of the `top_k` most likely, then of the most likely that sum to `top_p`."""
    if temperature == 0:
        return int(logits_V.argmax())
    largest_k, id_k = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    p_k = ((largest_k.double() - largest_k[0]) / temperature).softmax(0)
    if top_p is not None:
        p_k = torch.where(p_k.cumsum(0) - p_k < top_p, p_k, 0)
    p_V = torch.zeros(len(logits_V), dtype=torch.float64).scatter(0, id_k, p_k)
    return int((p_V / torch.empty_like(p_V).exponential_(generator=generator)).argmax())


def generate(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 256,
    **sampling: Any,
) -> str:
    """The continuation of a prompt that begins a document; `sampling` as in `generate_ids`."""
    start = [tokenizer.end] if tokenizer.opens_documents else []
    ids, new = [*start, *tokenizer.encode(prompt)], []
    if not ids:
        raise ValueError("the prompt has no tokens, and no token begins documents: give a text")
    for number in islice(generate_ids(model, ids, **sampling), max_tokens):
        if number == tokenizer.end:
            break
        new.append(number)
    return tokenizer.decode(ids + new).removeprefix(tokenizer.decode(ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Continue a text with the model next to this file."
    )
    parser.add_argument("--prompt", default="")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    loaded, its_tokenizer = load(Path(__file__).parent)
    assert its_tokenizer, "there is no tokenizer.json next to this file"
    print(options["prompt"] + generate(loaded, its_tokenizer, **options))
