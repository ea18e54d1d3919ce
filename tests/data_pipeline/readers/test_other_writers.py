"""What other libraries write goes in and comes out equal: webdataset, datasets; files at URLs."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from tests.data_pipeline.preparation.preparing import texts_of, tokens_of
from tests.data_pipeline.preparation.test_prepare_ids import SETTINGS as IDS
from tests.data_pipeline.readers.reading import END, WRITERS, find, one_file, read, texts
from tests.data_pipeline.readers.test_columns import TABLE, VALUES
from tests.data_pipeline.readers.test_tar import GOOD, archive

pytestmark = pytest.mark.slow  # the libraries take seconds to import
TEXTS = {f"sample-{number:03d}": f"text {number} é\n" * number for number in range(1, 12)}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_shards_of_webdataset(tmp_path: Path, suffix: str) -> None:
    import webdataset

    (tmp_path / "in").mkdir()
    (tmp_path / "ids").mkdir()
    ids = [[1 + n, 2, 3][: n % 3 + 1] for n in range(7)]
    with webdataset.ShardWriter(str(tmp_path / "ids" / f"%02d.{suffix}"), verbose=0) as writer:
        for number, document in enumerate(ids):
            writer.write({"__key__": f"{number}", "npy": np.array(document)})
    prepare_dataset([tmp_path / "ids" / "*"], tmp_path / "out-ids", IDS)
    assert tokens_of(tmp_path / "out-ids") == [[END, *document] for document in ids]
    pattern = str(tmp_path / "in" / f"%02d.{suffix}")
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for number, (key, text) in enumerate(TEXTS.items()):
            content = [{"txt": text}, {"json": {"text": text}}, {"json": {"text": text}, "cls": 7}]
            writer.write({"__key__": key, **content[number % 3]})
    prepare_dataset([tmp_path / "in"], tmp_path / "out", PrepareSettings(format="tar"))
    read_back = texts_of(tmp_path / "out")
    assert [id_.partition(":")[2] for id_ in read_back] == [*TEXTS]
    assert [*read_back.values()] == [*TEXTS.values()]


def test_a_saved_dataset_and_its_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    rows = {"text": [*TEXTS.values()], "ids": [[n + 1, n + 2] for n in range(len(TEXTS))]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "in", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "in")
    loaded.map(lambda row: {"text": row["text"] + "changed"})
    assert any(path.name.startswith("cache-") for path in (tmp_path / "in").iterdir())
    prepare_dataset([tmp_path / "in"], tmp_path / "out", PrepareSettings())
    assert [*texts_of(tmp_path / "out").values()] == rows["text"]
    prepare_dataset([tmp_path / "in"], tmp_path / "ids", IDS)
    assert tokens_of(tmp_path / "ids") == [[END, *ids] for ids in rows["ids"]]


def test_every_container_is_read_from_object_storage(bucket: Any, tmp_path: Path) -> None:
    csv = "text\n" + "".join(f'"{text}"\n' for text in VALUES if text)
    files = {
        "a.tar": archive(*GOOD),
        "b.tar.gz": gzip.compress(archive(*GOOD)),
        "c.arrow": TABLE,
        "d.csv": csv.encode(),
    }
    for name, content in files.items():
        bucket.pipe(f"bucket/{name}", content)
    expected = {
        "a.tar": ["one", "zwei é"], "b.tar.gz": ["one", "zwei é"], "c.arrow": VALUES,
        "d.csv": [text for text in VALUES if text],
    }  # fmt: skip
    for name, wanted in expected.items():
        assert texts(read(one_file(f"s3://bucket/{name}"))) == wanted
    documents = [[1, 2], [3]]
    for suffix, write in WRITERS.items():
        write(tmp_path / f"in.{suffix}", documents)
    for path in tmp_path.iterdir():
        bucket.pipe(f"bucket/ids/{path.name}", path.read_bytes())
    found = find("s3://bucket/ids", format="ids", ids=IDS.id_rules)
    for file in found.files:
        assert texts(read(file)) == ["1 2", "3"], file.name
