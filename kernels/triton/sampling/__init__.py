"""From logits to tokens.

next token                greedy_head in greedy steps of up to 16 rows, with the product of the head; else sampler
  parts                   gumbel, filters, rows
before it                 bitmask of a grammar
after it                  token_counts for penalties, logprobs
drafts of a model         drafts verifies them
"""
