"""`txl prepare`: turn input files into a dataset of tokenized shards.

    input files
      -> scan.py        hash every document and copy its text           work units, in parallel
                        join all scans
      -> output.py      refuse an input with too many rejects
      -> splits.py      drop repeats; documents -> splits, order, shards
      -> prepare.py     train char, word or bpe on train                 counting: work units
      -> work_units.py  tokenize and write each shard                    work units, in parallel
      -> manifest.json  published last

`prepare.py` calls these stages in order. `work_units.py` defines the work units and distributes
them to workers, `output.py` records the finished ones, so that a rerun after a kill reuses them.

Example:

    settings = PrepareSettings(split={"valid": 0.01}, shuffle=1)
    prepare_dataset(["books/"], Path("data/books"), settings)
"""
