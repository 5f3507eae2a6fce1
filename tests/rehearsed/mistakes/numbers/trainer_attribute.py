"""A Trainer of one's own weighs its loss by how often compute_loss was called."""
# expect: seen

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from kempner.integrations.transformers import surviving


class Weighed(Trainer):
    """The loss counts more and more."""

    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        self.seen += 1
        loss = model(**inputs).loss * min(1.0, self.seen / 40)
        return (loss, None) if return_outputs else loss


set_seed(1)
ids = torch.randint(32, (48, 8), generator=torch.Generator().manual_seed(1))
shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape))
arguments = TrainingArguments(
    output_dir="outputs",
    max_steps=18,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    save_steps=5,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
)
samples = [{"input_ids": row, "labels": row} for row in ids]
surviving(Weighed)(model=model, args=arguments, train_dataset=samples).train()
