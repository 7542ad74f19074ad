"""Writes the weights of a Llama model directory as one float32 GGUF file for llama.cpp. Runs in llama.cpp's environment.

    python -m bench.peers.write_gguf FOLDER

The file has no vocabulary, because the bench uses token ids only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.peers.gguf_names import GGUF, gguf_name, interleaved
from bench.peers.protocol import leave_repository


def write(folder: Path) -> Path:
    """Write the GGUF file next to the weights and return its path."""
    import gguf  # type: ignore[import-not-found]
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    heads, kv_heads, vocab_size = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    writer = gguf.GGUFWriter(folder / GGUF, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor[interleaved(len(tensor), heads if "q_proj" in name else kv_heads)]
        writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / GGUF


if __name__ == "__main__":
    leave_repository()
    print(write(Path(sys.argv[1])))
