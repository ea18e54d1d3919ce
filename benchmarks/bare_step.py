"""One step of DeepSpeed on each rank, by the bare libraries: what a start is compared with.

`start_time.py` runs it under torchrun; `bare_ray_start.py` calls `step` in the workers of Ray. It
must import nothing of this project.
"""

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
