"""Inputs and state of a step.

rows of tables            embedding: of the embedding by token, of the rotation by position
decode steps              inputs: from the state of slots, which it then advances
KV blocks                 blocks, moved within the cache and to the host tier
"""
