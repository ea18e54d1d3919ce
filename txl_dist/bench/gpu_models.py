"""The published configurations that `txl bench gpu` measures, and peaks of GPUs by data sheet.

The paper's sizes equal those of configs/paper (a test compares them). NVIDIA's base is that of its
DeepLearningExamples. `num_lanes` is the published batch on one GPU of those it was trained on.

Sources: Dai et al. 2019, arXiv:1901.02860, and its code;
https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/LanguageModeling/Transformer-XL
"""

from dataclasses import dataclass

from txl_dist.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One model and the shape of its micro-batch on one GPU."""

    config: ModelConfig
    tgt_len: int
    num_lanes: int
    mfu_goal: float | None = None
    """Goal of this project on one H100, against its data sheet."""


_WT103_CUTOFFS = (20_000, 40_000, 200_000)

MODELS = {
    "nvidia-base": BenchModel(
        config=ModelConfig(
            vocab_size=267_735, cutoffs=(19_997, 39_997, 199_997), n_layer=16, d_model=512,
            n_head=8, d_head=64, d_inner=2048, mem_len=192, dropout=0.1,
        ),
        tgt_len=192,
        num_lanes=32,
        mfu_goal=0.25,
    ),
    "wt103-base": BenchModel(
        config=ModelConfig(
            vocab_size=267_735, cutoffs=_WT103_CUTOFFS, n_layer=16, d_model=410, n_head=10,
            d_head=41, d_inner=2100, mem_len=150, dropout=0.1,
        ),
        tgt_len=150,
        num_lanes=60,
        mfu_goal=0.25,
    ),
    "wt103-large": BenchModel(
        config=ModelConfig(
            vocab_size=267_735, cutoffs=_WT103_CUTOFFS, div_val=4,
            tie_projs=(False, True, True, True), n_layer=18, d_model=1024, n_head=16, d_head=64,
            d_inner=4096, mem_len=384, dropout=0.2, dropatt=0.2,
        ),
        tgt_len=384,
        num_lanes=32,
        mfu_goal=0.40,
    ),
    "enwik8-base": BenchModel(
        config=ModelConfig(
            vocab_size=204, n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048,
            mem_len=512, dropout=0.1,
        ),
        tgt_len=512,
        num_lanes=22,
        mfu_goal=0.30,
    ),
    "enwik8-large": BenchModel(
        config=ModelConfig(
            vocab_size=204, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072,
            mem_len=768, dropout=0.15, dropatt=0.15,
        ),
        tgt_len=768,
        num_lanes=16,
        mfu_goal=0.40,
    ),
}  # fmt: skip
"""By name, in the order of the table."""

DATA_SHEET_TFLOPS = {
    # The most specific name first: the words of a device's name contain all words of one of these.
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
}
"""Dense bf16 products of one GPU, from NVIDIA's data sheets (without sparsity)."""


def data_sheet_flops(device_name: str) -> float | None:
    """Peak FLOP/s in bf16; None for a GPU that is not in the table, and for a part of one (MIG)."""
    words = set(device_name.replace("-", " ").split())
    if "MIG" in words:
        return None
    return next(
        (
            tflops * 1e12
            for name, tflops in DATA_SHEET_TFLOPS.items()
            if words.issuperset(name.split())
        ),
        None,
    )
