"""Answers fixed questions with the exported model, greedy and sampled, as Markdown for its model card."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import DEMO_MODEL_DIR

QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is a list comprehension?",
    "What does os.path.join do?",
    "Write a function that adds two numbers.",
    "How do I read a file?",
    "What does dict.setdefault do?",
    "Explain what a generator is, and when I should use one.",
    "Count from 1 to 5.",
    "What is the json module for?",
    "Write a Python function that multiplies three numbers.",
    "Tell me a story.",
    "Why is the sky blue?",
)


def answer(model: Any, tokenizer: Any, question: str, temperature: float) -> str:
    """The model's words, up to its end of turn or 200 tokens. Temperature zero is greedy."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature else {"do_sample": False}
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=200, **sampling)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    for question in args.questions:
        sys.stdout.write(f"**{question}**\n\n{answer(model, tokenizer, question, args.temperature)}\n\n")


if __name__ == "__main__":
    main()
