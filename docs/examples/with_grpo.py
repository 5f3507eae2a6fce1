"""GRPO of TRL under kempner: kempner supervise --nproc 2 -- python with_grpo.py"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from kempner.integrations.transformers import surviving

WORDS, PROMPTS = 32, 24


def tokenizer() -> PreTrainedTokenizerFast:
    """Of made-up words; a real program loads its model's here."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", padding_side="left"
    )


def even(completions: list[str], **_: object) -> list[float]:
    """The reward: which share of the words is even."""
    said = [[int(word[1:]) for word in completion.split()] for completion in completions]
    return [sum(n % 2 == 0 for n in words) / max(1, len(words)) for words in said]


def main() -> None:
    set_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, pad_token_id=0, eos_token_id=1, **shape)
    )
    arguments = GRPOConfig(
        output_dir="grpo",
        max_steps=16,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=4,  # completions of a prompt
        steps_per_generation=4,  # generated at once for two optimizer steps,
        num_iterations=2,  # and trained on twice
        max_completion_length=6,
        learning_rate=1e-3,
        save_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = surviving(GRPOTrainer)(
        model=model,
        args=arguments,
        reward_funcs=even,
        train_dataset=Dataset.from_dict({"prompt": [f"w{n} w{n + 1}" for n in range(2, PROMPTS)]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_model("final")


if __name__ == "__main__":
    main()
