"""`txl prepare`: turn input files into a dataset of tokenized shards.

    input files
      -> scan.py                locate and hash every document       work units, in parallel
      -> input_index.py         join all scans, 52 bytes per document and no text
      -> input_checks.py        refuse an input with too many rejects
      -> deduplicate.py         drop documents with a repeated text
      -> shard_assignment.py    documents -> splits, order, shards
      -> tokenizer_training.py  train char, word or bpe on train     char and word: work units
      -> tokenization.py        tokenize and write each shard        work units, in parallel
      -> manifest.json          published last

`prepare.py` calls these stages in order. `work_units.py` defines the work units, `unit_runner.py`
distributes them to workers and `finished_units.py` records the finished ones, so that a rerun
after a kill reuses them.

Example:

    settings = PrepareSettings(split={"valid": 0.01}, shuffle=1)
    prepare_dataset(["books/"], Path("data/books"), settings)
"""
