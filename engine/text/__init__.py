"""Between text and token ids: tokenizer, chat templates, the text of an answer as it arrives. No torch."""
