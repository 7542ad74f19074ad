"""Speculative decoding: which tokens to draft, and when drafts pay. Verification changes no token. No torch."""
