"""Structured output: answers that satisfy a JSON schema, regular expression, choices or grammar. Only `masks` knows torch.

    spec.py        grammar_spec(sampling) -> GrammarSpec | None        checks fields, imports no grammar library
                   GrammarSpec(kind, text), hashable; .param names the field
                   GrammarError(param, message), an InvalidOption
    vocabulary.py  load_vocabulary(directory, vocab_size, eos_token_ids) -> Vocabulary
                   Vocabulary(tokens, eos_token_ids, strips_first_space)
    compiler.py    GrammarCompiler(vocabulary, deadline_s=, workers=)   round robin over tenants (compile_queue.py)
                   .submit(spec, tenant_id) -> Future[CompiledGrammar] raises GrammarError through the future
                   .close()
    matcher.py     CompiledGrammar.start() -> GrammarState             one per answer, microseconds
                   GrammarState.fill_mask(row)                         row: [ceil(V / 32)] int32, 1 = allowed; releases the GIL
                   GrammarState.accept(token_id), .is_complete
    queue.py       GrammarQueue                                        requests that wait for their grammar
    masks.py       GrammarMasks                                        masks of a step, filled in a thread meanwhile

A constraint becomes a grammar of the library in a process of its own (`worker.py`), in this order:

    lark              any constraint; `gbnf` reads grammars in the notation of llama.cpp
    json_schema       a schema, by way of the next four
    schema_document   its draft and references; `schema_keywords`: each keyword as constraints, see `schema_nodes`
    schema_cases      alternatives taken apart until any single case suffices; `schema_values`: whether a value satisfies it
    shapes            the values of a case, type by type
    json_grammar      shapes as rules: `json_containers`, `json_numbers`, `lark_rules`; `terminals` for the contents of strings
    patterns          patterns and names of `formats` as languages: `regex` over `char_sets`; `numbers` as automata

End-of-sequence ids are allowed by the mask exactly while `is_complete`. Both `fill_mask` and `accept` raise `GrammarError`,
which ends that request alone.
"""
