"""Trains the demo models' byte-level BPE tokenizers."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# The demo models are trained on Python, not on chats: a chat becomes a comment block followed by
# code.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, context_len: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts` with exactly `vocab_size` entries; id 0 is the end of text.

    Any byte string survives encode and decode unchanged, because all 256 bytes are entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context_len,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
