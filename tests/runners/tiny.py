"""Models small enough to be made in a test: a Llama over bytes, written as a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """258 tokens: padding, the end, and the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(("<pad>", "<end>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def model_folder(folder: Path, seed: int) -> Path:
    """A Llama over bytes whose choices are clear."""
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=2, eos_token_id=1, **sizes))
    module.lm_head.weight.data *= 10
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    return folder
