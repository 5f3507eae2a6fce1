"""transformers under kempner: kempner supervise --nproc 2 -- python with_transformers.py"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from kempner.integrations.transformers import surviving

SAMPLES, LENGTH, VOCABULARY = 96, 16, 64


def samples() -> list[dict[str, torch.Tensor]]:
    """Made-up token ids; a real program loads a dataset here."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    set_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, attention_dropout=0.1, **shape)
    )
    arguments = TrainingArguments(
        output_dir="outputs",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        save_steps=10,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = surviving(Trainer)(model=model, args=arguments, train_dataset=samples())
    trainer.train()
    trainer.save_model("final")


if __name__ == "__main__":
    main()
