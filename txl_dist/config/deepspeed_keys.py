"""The top-level keys of DeepSpeed's JSON: those this project decides, and those it passes on."""

DECIDED_BY = {
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.gradient_clipping",
    "train_batch_size": "data.num_lanes",
    "train_micro_batch_size_per_gpu": "training.micro_batch_lanes",
    "gradient_accumulation_steps": "training.micro_batch_lanes",
    "managed_gradient_accumulation": "training.micro_batch_lanes",
    "gradient_allreduce_op": "data.num_lanes",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",  # DeepSpeed still reads the old name
    "data_types": "precision",
    "torch_autocast": "precision",
    "checkpoint": "training",
}
"""Keys of DeepSpeed's JSON, and the setting of ours that decides each."""

READ_BY_DEEPSPEED = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "memory_breakdown",
        "nebula",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "seq_parallel_communication_data_type",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Every other key that DeepSpeed 0.19.8 reads, removed ones that it refuses by name included. It
ignores all others without a word.
"""
