"""Which guesses of a step become tokens: verification of speculative decoding, without changing what would be generated.

Two rules, both lossless:

    equality   Each row draws its token with the noise of (seed, position) that plain decoding would use there, and
               guesses are accepted as long as they equal what was drawn. Where the guess does not depend on chance, this is
               the rule of Leviathan et al. (arXiv 2211.17192) itself, coupled to that noise: a guess x is a distribution q
               with all its mass on x, it is accepted with probability min(1, p(x) / q(x)) = p(x), the chance that the
               draw is x; and given that it is not, the draw follows p without x, which is the residual
               norm(max(0, p − q)). The tokens are therefore the very ones of plain decoding, at any temperature.
    rejection  For guesses that a draft model drew from its own q: x is accepted if uniform < p(x) / q(x), else one token is
               drawn from the residual, and after the last guess one from p. More guesses are accepted than by equality, and
               the tokens have the distribution of plain decoding, but are not the same ones for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.randomness import key, signed, uniform
from engine.sampling.sampler import NO_TOKEN, NOT_FINITE, SampledToken
from engine.scheduling.scheduled_batch import StepOutput
from kernels.ops import plain_sampling

GUESS, ACCEPT, RESIDUAL = 1, 2, 3
"""Draws beside draw 0, which chooses the token of plain decoding: their noise is independent of its and of each other's."""


def accept_equal(drawn: Sequence[SampledToken], guesses: Sequence[int]) -> StepOutput:
    """Tokens up to the first one that was guessed wrong, that one included.

    drawn: one per guess and one more. A row that failed behind good ones is left to the next step, which computes it again.
    """
    if not guesses:
        return _alone(drawn[0])
    taken: list[SampledToken] = []
    for index, token in enumerate(drawn):
        if token.token_id is None:
            if not taken:
                return StepOutput(error=token.error, error_param=token.error_param)
            break
        taken.append(token)
        if index < len(guesses) and token.token_id != guesses[index]:
            break
    logprobs = [token.logprob for token in taken if token.logprob is not None]
    return StepOutput(token_ids=[token.token_id for token in taken if token.token_id is not None], logprobs=logprobs or None)


def _alone(token: SampledToken) -> StepOutput:
    if token.token_id is None:
        return StepOutput(error=token.error, error_param=token.error_param)
    return StepOutput([token.token_id], None if token.logprob is None else [token.logprob])


def accept_by_rejection(
    target: torch.Tensor, draft: torch.Tensor, guesses: Sequence[int], *, seed: int, position: int
) -> StepOutput:
    """Tokens by the rule of Leviathan et al.; the first one is for `position` of the request.

    target: [k + 1, V] float32, draft: [k, V] float32, rows that sum to 1; guesses: k tokens, guess i drawn from draft[i]
    """
    ids = torch.tensor(guesses, dtype=torch.int64, device=target.device)[:, None]
    proposed = draft.gather(1, ids)[:, 0].tolist()
    wanted = target[:-1].gather(1, ids)[:, 0].tolist()
    for index in range(len(guesses)):
        if uniform(seed, position + index, draw=ACCEPT) * proposed[index] >= wanted[index]:
            rest = (target[index] - draft[index]).clamp_(min=0)
            return _with_last(guesses[:index], rest, target[index], key(seed, position + index, draw=RESIDUAL))
    return _with_last(guesses, target[-1], target[-1], key(seed, position + len(guesses)))


def _with_last(accepted: Sequence[int], weights: torch.Tensor, fallback: torch.Tensor, noise: int) -> StepOutput:
    """The accepted guesses and one more token, drawn by `weights`; where rounding left none, p and q are equal: by p."""
    keys = torch.tensor([signed(noise)], dtype=torch.int64, device=weights.device)
    token_id = int(plain_sampling.draw_weighted(weights[None], keys))
    if token_id == NO_TOKEN:
        token_id = int(plain_sampling.draw_weighted(fallback[None], keys))
    if token_id == NO_TOKEN:
        return StepOutput(token_ids=list(accepted)) if accepted else StepOutput(error=NOT_FINITE)
    return StepOutput(token_ids=[*accepted, token_id])
