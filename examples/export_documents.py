"""Write the documents of a split as JSON lines of id and text, in the order of the dataset.

    python examples/export_documents.py data/books train > train.jsonl
    txl prepare train.jsonl --out data/again --tokenizer data/books/tokenizer.json

The dataset may be a URL. Texts are exact if the tokenizer loses nothing; words lose their
whitespace, for example. The text of a dataset of token ids is its ids.
"""

import json
import sys

from txl_dist import open_split, open_tokenizer


def main(directory: str, split: str) -> None:
    """Print a line per document."""
    tokenizer, reader = open_tokenizer(directory), open_split(directory, split)
    for document in reader.documents():
        tokens = reader.read(document.block, document.start, document.stop)
        text = tokenizer.decode_bytes(tokens).decode("utf-8")
        print(json.dumps({"id": document.id, "text": text}))


if __name__ == "__main__":
    main(*sys.argv[1:])
