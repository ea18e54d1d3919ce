"""The dataset of a run: its manifest, the sizes of its files, and its digest."""

from data_pipeline.errors import TxlError
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_files import check_sizes
from data_pipeline.system.remote_path import dataset_path
from txl_dist.doctor.finding import Finding, ok, problem


def check_dataset(data: str) -> list[Finding]:
    """Load the manifest of a directory or URL, and compare the sizes of all files with it."""
    directory = dataset_path(data)
    try:
        manifest = load_manifest(directory)
        for split in manifest.splits.values():
            check_sizes(directory, split.shards)
    except TxlError as error:
        text, _, advice = str(error).partition(". ")
        return [
            problem(
                text,
                expected="a complete dataset, at the same path on every node",
                advice=advice or "check the path, and the mount on this node",
            )
        ]
    tokens = sum(split.tokens for split in manifest.splits.values())
    return [
        ok(
            f"{directory}: {tokens:,} tokens in {len(manifest.shards)} shards, digest "
            f"{manifest.digest[:12]}",
            equal_on_all_nodes=manifest.digest,
        )
    ]
