"""transformers' Trainer, with an evaluation and a schedule."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from kempner.integrations.transformers import surviving

set_seed(1)
ids = torch.randint(32, (48, 8), generator=torch.Generator().manual_seed(1))
shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, num_hidden_layers=1, attention_dropout=0.1, **shape)
)
arguments = TrainingArguments(
    output_dir="outputs",
    max_steps=18,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    save_steps=5,
    eval_strategy="steps",
    eval_steps=6,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
)
samples = [{"input_ids": row, "labels": row} for row in ids]
trainer = surviving(Trainer)(
    model=model, args=arguments, train_dataset=samples[:40], eval_dataset=samples[40:]
)
trainer.train()
