"""From logits to the next token, in two ways that choose the same tokens.

plain        sampler: rows on any device; logits_rules, bad_words, logits_filters, and the log-probabilities in logprobs
over slots   columns: by kernels, which read the parameters of a request in its slot; log-probabilities in scores;
             host_masks: what only the host knows to be forbidden
both         randomness, by seed and position; acceptance of draft tokens
"""
