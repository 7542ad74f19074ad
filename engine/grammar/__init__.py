"""Structured output: an answer held to a JSON schema, a regular expression, choices or a grammar. Only `masks` knows torch.

    spec.py        grammar_spec(sampling) -> GrammarSpec | None        checks fields, imports no grammar library
                   GrammarSpec(kind, text), hashable; .param names the field
                   GrammarError(param, message), an InvalidOption
    vocabulary.py  load_vocabulary(directory, vocab_size, eos_token_ids) -> Vocabulary
                   Vocabulary(tokens, eos_token_ids, strips_first_space)
    compiler.py    GrammarCompiler(vocabulary, deadline_s=, workers=)   tenants take turns (compile_lines.py)
                   .submit(spec, tenant_id) -> Future[CompiledGrammar] raises GrammarError through the future
                   .close()
    matcher.py     CompiledGrammar.start() -> GrammarState             one per answer, microseconds
                   GrammarState.fill_mask(row)                         row: [ceil(V / 32)] int32, 1 = allowed; releases the GIL
                   GrammarState.accept(token_id), .is_complete

End-of-sequence ids are allowed by the mask exactly while `is_complete`. Both `fill_mask` and `accept` raise `GrammarError`,
which ends that request alone.
"""
