"""Writes a finished run as a Hugging Face model directory: `python -m engine.demo.export --help`."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.demo import DEMO_MODEL_DIR
from engine.demo.network import Shape
from engine.demo.rows import BOS, BOS_ID, CHAT_TEMPLATE, END, END_ID, PAD, PAD_ID, SPECIALS, START

MAX_BYTES = 16_000_000


def named_weights(state: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The trained weights under the names of transformers' LlamaForCausalLM, fused projections taken apart.

    float16, because it keeps three more bits of each weight than bfloat16, and no weight here comes near its limits.
    """
    named = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["norm.weight"]}
    for idx in range(shape.num_hidden_layers):
        ours, theirs = f"layers.{idx}.", f"model.layers.{idx}."
        q, k, v = torch.split(state[ours + "qkv.weight"], list(shape.qkv_sizes))
        gate, up = state[ours + "gate_up.weight"].chunk(2)
        named |= {
            theirs + "input_layernorm.weight": state[ours + "attention_norm.weight"],
            theirs + "self_attn.q_proj.weight": q,
            theirs + "self_attn.k_proj.weight": k,
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.o_proj.weight": state[ours + "out.weight"],
            theirs + "post_attention_layernorm.weight": state[ours + "feed_norm.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": state[ours + "down.weight"],
        }
    halves = {name: weight.to(torch.float16).contiguous() for name, weight in named.items()}
    if not all(bool(weight.isfinite().all()) for weight in halves.values()):
        raise ValueError("a weight does not fit float16")
    return halves


def model_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float16",
        "use_cache": True,
    }


def generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": [END_ID],
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 256,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    added_tokens = {
        str(idx): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for idx, token in enumerate(SPECIALS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added_tokens,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [START],
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def training_record(run: Path, state: dict[str, Any], params: int, notes: list[str]) -> dict[str, Any]:
    """The contents of training.json: settings, corpus, progress and the losses reached."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    started = next(line for line in reversed(log) if line["kind"] == "start")
    validations = [line for line in log if line["kind"] == "val"]
    keys = ("prose", "bits_per_byte", "new_facts", "known_facts")
    progress = state["progress"]
    return {
        "machine": "2-core CPU, one thread used, bfloat16 matrix products",
        "command": "python -m engine.demo.train --run RUN --compile --minutes {:g}".format(state["settings"]["minutes"]),
        "params": params,
        "shape": state["shape"],
        "settings": state["settings"],
        "corpus": {key.removeprefix("corpus_"): started[key] for key in started if key.startswith("corpus_")},
        "resumed_at_steps": [line["step"] for line in log if line["kind"] == "start" and line["resumed"]],
        "notes": notes,
        "steps": progress["step"],
        "tokens": progress["tokens"],
        "minutes": round(progress["elapsed_s"] / 60, 1),
        "train_loss": round(progress["train_loss"], 4),
        "validation": {key: validations[-1][key] for key in keys} if validations else {},
        "validation_units": "nats per token; known_facts: built-in functions, new_facts: answers never asked for in training",
    }


def export(run: Path, out: Path, notes: list[str]) -> None:
    """Fills out with everything that comes from the run. README.md and LICENSE are written by hand and not touched."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    shape = Shape(**state["shape"])
    out.mkdir(parents=True, exist_ok=True)
    weights = named_weights(state["network"], shape)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    shutil.copyfile(run / "tokenizer.json", out / "tokenizer.json")
    _write_json(out / "config.json", model_config(shape))
    _write_json(out / "generation_config.json", generation_config())
    _write_json(out / "tokenizer_config.json", tokenizer_config(shape))
    record = training_record(run, state, sum(weight.numel() for weight in weights.values()), notes)
    record["weights_sha256"] = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    _write_json(out / "training.json", record)
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"the model directory has {size} bytes, more than {MAX_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the directory given to engine.demo.train")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL_DIR, help="the model directory to write")
    parser.add_argument("--note", action="append", default=[], help="a line for training.json, for what settings cannot say")
    args = parser.parse_args()
    export(args.run, args.out, args.note)


if __name__ == "__main__":
    main()
