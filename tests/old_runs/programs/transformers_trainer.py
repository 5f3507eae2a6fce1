"""transformers' Trainer over two epochs."""

import torch
from notes import end, note, state_of, stop_in
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from kempner.integrations.transformers import surviving

SAMPLES, LENGTH, VOCABULARY = 48, 8, 96


def samples():
    """Sample i begins with token i."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    ids[:, 0] = torch.arange(SAMPLES)
    return [{"input_ids": row, "labels": row} for row in ids]


class Noting(Trainer):
    def training_step(self, model, inputs, *more, **options):
        step, state = self.state.global_step + 1, state_of(model, self.optimizer)
        loss = super().training_step(model, inputs, *more, **options)
        note(step, inputs["input_ids"][:, 0].tolist(), loss.item(), state)
        stop_in(step)
        return loss


def main():
    set_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        attention_dropout=0.1,
        max_position_embeddings=LENGTH,
        **shape,
    )
    arguments = TrainingArguments(
        output_dir="outputs",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=5,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = surviving(Noting)(LlamaForCausalLM(config), arguments, train_dataset=samples())
    trainer.train()
    end(trainer.model)


if __name__ == "__main__":
    main()
