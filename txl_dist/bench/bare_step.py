"""The program of `txl bench start` for the bare libraries: one step of DeepSpeed, on each rank.

It is text, run as a file: what is compared with `txl train` must import nothing of this project.
`cluster/bare_start.py` calls its function `step` in the workers of Ray.
"""

BARE_STEP = """
import os

import torch


def step():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Not compiled: training never needs this operation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(torch.randn(1, 64)).square().mean())
    engine.step()
    print("step 1 | loss", flush=True)


if __name__ == "__main__":
    step()
"""
