"""Aliases: the names Megatron-LM, transformers and nanoGPT have for keys of the run spec, for did-you-mean hints.

Edit distance misleads here: it maps num_attention_heads to attention_bias.
"""

from __future__ import annotations

_OURS: dict[str, tuple[str, ...]] = {
    "model.layers": ("num_hidden_layers", "n_layers"),
    "model.hidden": ("n_embd", "d_model", "embedding_size"),
    "model.heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "model.kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads", "num_kv_heads"),
    "model.ffn": ("intermediate_size", "ffn_hidden_size", "d_ff", "n_inner", "mlp_ratio"),
    "model.head_dim": ("kv_channels", "d_kv"),
    "model.max_seq_len": ("max_position_embeddings", "n_positions"),
    "model.tied": ("tie_word_embeddings", "untie_embeddings_and_output_weights"),
    "model.dropout": ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    "model.init_std": ("initializer_range", "init_method_std"),
    "model.window": ("sliding_window",),
    "model.moe.experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "model.moe.top_k": ("num_experts_per_tok", "moe_router_topk"),
    "optim.lr": ("learning_rate",),
    "optim.min_lr": ("min_learning_rate",),
    "optim.warmup": ("lr_warmup_steps", "lr_warmup_iters", "warmup_ratio"),
    "optim.warmup_init": ("lr_warmup_init",),
    "optim.schedule": ("lr_decay_style", "lr_scheduler_type"),
    "optim.decay": ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    "optim.decay_end": ("lr_decay_iters", "lr_decay_samples", "lr_decay_steps"),
    "optim.decay_shape": ("lr_wsd_decay_style",),
    "optim.clip": ("max_grad_norm", "clip_grad", "grad_clip"),
    "optim.betas": ("beta1", "beta2", "adam_beta1", "adam_beta2"),
    "optim.name": ("optimizer",),
    "train.global_batch": ("batch_size", "train_batch_size"),
    "parallel.micro_batch": ("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    "train.steps": ("max_iters", "train_iters", "max_duration"),
    "train.precision": ("dtype", "torch_dtype", "bf16", "fp16", "fp8"),
    "data.seq_len": ("block_size", "sequence_length"),
    "data.train": ("data_path", "dataset", "train_data_path"),
    "data.tokenizer": ("tokenizer_model", "vocab_file", "tokenizer_path"),
    "parallel.tp": ("tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_size"),
    "parallel.pp": ("pipeline_parallel", "pipeline_model_parallel_size"),
    "parallel.cp": ("context_parallel", "context_parallel_size"),
    "parallel.ep": ("expert_parallel", "expert_model_parallel_size"),
    "parallel.recompute": ("activation_checkpointing", "gradient_checkpointing", "recompute_granularity"),
    "checkpoint.every": ("save_interval", "save_steps"),
    "log.every": ("log_interval", "logging_steps"),
    "eval.every": ("eval_interval", "eval_steps"),
    "eval.batches": ("eval_iters",),
    "eval.patience": ("early_stopping_patience", "early_stopping"),
    "eval.min_delta": ("early_stopping_threshold",),
    "checkpoint.best": ("load_best_model_at_end", "save_best"),
    "data.validation": ("valid_data_path", "eval_dataset", "validation_data"),
    "log.samples": ("sample_prompts",),
}
OTHER_NAMES = {theirs: ours for ours, names in _OURS.items() for theirs in names}

_ON_KUBERNETES = (
    "on Kubernetes, by what the cluster has: jobset (JobSet), indexed-job (nothing installed), pytorchjob or trainjob (Kubeflow), "
    "hyperpod (SageMaker HyperPod)"
)
# What to choose instead of a value that is no choice of a key, though people write it.
OTHER_VALUES = {
    ("cluster.target", word): fix
    for words, fix in {
        ("kubernetes", "k8s", "kube", "eks", "aks", "gke", "openshift"): _ON_KUBERNETES,
        ("job", "batch"): _ON_KUBERNETES,
        ("kubeflow", "mpijob"): "Kubeflow's operators: trainjob (version 2) or pytorchjob (version 1)",
        ("sagemaker",): "hyperpod, for SageMaker HyperPod",
        ("sbatch", "srun"): "slurm",
        ("laptop", "here", "machine", "docker"): "local, for this machine",
    }.items()
    for word in words
}
