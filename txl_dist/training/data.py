"""TrainingData: the dataset of a run, opened and checked before any rank is started."""

from dataclasses import dataclass, replace

from data_pipeline.lanes import LanePlan
from data_pipeline.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.remote import dataset_path
from data_pipeline.shard_reader import SplitReader, open_split
from data_pipeline.tokenizers import Tokenizer
from txl_dist.config import RunConfig
from txl_dist.errors import ConfigError, DataError
from txl_dist.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What the data decides: who reads what, the vocabulary, and so the model's size."""

    manifest: ShardManifest
    tokenizer: Tokenizer
    plan: LanePlan
    model_config: ModelConfig
    """The config's model with the data's vocabulary."""

    @classmethod
    def open(cls, config: RunConfig, *, num_ranks: int) -> "TrainingData":
        """Check everything that can be checked without reading shards.

        Raises DataError for missing, damaged or foreign data, ConfigError for more ranks than
        lanes.
        """
        where = dataset_path(config.data.path)
        manifest = load_manifest(where)
        tokenizer = open_tokenizer(where, manifest)
        train = manifest.split(config.data.train_split, where)
        if config.evaluation.split is not None:
            manifest.split(config.evaluation.split, where)
        vocab_size = config.model.vocab_size or manifest.vocab_size
        if vocab_size != manifest.vocab_size:
            raise DataError(
                f"model.vocab_size={vocab_size}, but {where} was prepared with a tokenizer of "
                f"{manifest.vocab_size} ids (digest {manifest.tokenizer_digest}). Set data.path to "
                "the right data, or model.vocab_size=0 to take what the data has"
            )
        plan = LanePlan(
            num_tokens=train.tokens, num_lanes=config.data.num_lanes, tgt_len=config.data.tgt_len
        )
        plan.rows_per_rank(num_ranks)  # refuses more ranks than lanes
        try:
            model_config = replace(config.model, vocab_size=manifest.vocab_size)
        except ValueError as error:
            raise ConfigError(f"model, with the vocabulary of {where}: {error}") from None
        return cls(manifest, tokenizer, plan, model_config)

    def open_split(self, config: RunConfig, name: str) -> SplitReader:
        return open_split(config.data.path, name, manifest=self.manifest)
