"""Between text and token ids: tokenizer, chat templates, the text of an answer as it comes. No torch."""
