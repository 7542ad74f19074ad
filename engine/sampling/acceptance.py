"""Verification of draft tokens in speculative decoding, without changing what would be generated.

Two rules, both lossless:

    equality   Each row draws its token with the noise of (seed, position) that plain decoding would use there, and
               drafts are accepted as long as they equal what was drawn. Where the draft does not depend on chance, this is
               the rule of Leviathan et al. (arXiv 2211.17192) itself, coupled to that noise: a draft x is a distribution q
               with all its mass on x, it is accepted with probability min(1, p(x) / q(x)) = p(x), the chance that the
               draw is x; and given that it is not, the draw follows p without x, which is the residual
               norm(max(0, p − q)). The tokens are therefore the very ones of plain decoding, at any temperature.
    rejection  For tokens that a draft model drew from its own q: x is accepted if uniform < p(x) / q(x), else one token is
               drawn from the residual, and after the last draft one from p. More drafts are accepted than by equality, and
               the tokens have the distribution of plain decoding, but are not the same ones for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.randomness import signed, stream
from engine.sampling.sampler import NOT_FINITE, SampledToken
from engine.scheduling.scheduled_batch import StepOutput
from kernels import ops


def accept_equal(drawn: Sequence[SampledToken], draft_ids: Sequence[int]) -> StepOutput:
    """The accepted draft tokens, then the drawn token that replaces the first rejected one or follows the last.

    drawn: one token per draft and one more. If a row fails after good ones, it is dropped and the next step recomputes it.
    """
    accepted: list[SampledToken] = []
    for index, token in enumerate(drawn):
        if token.token_id is None:
            if not accepted:
                return StepOutput(error=token.error, error_param=token.error_param)
            break
        accepted.append(token)
        if index < len(draft_ids) and token.token_id != draft_ids[index]:
            break
    logprobs = [token.logprob for token in accepted if token.logprob is not None]
    return StepOutput(token_ids=[token.token_id for token in accepted if token.token_id is not None], logprobs=logprobs or None)


def accept_by_rejection(
    target: torch.Tensor, draft: torch.Tensor, draft_ids: Sequence[int], *, seed: int, position: int
) -> StepOutput:
    """Tokens by the rule of Leviathan et al.; the first is for `position` of the request.

    target: [k + 1, V] float32, draft: [k, V] float32, rows that sum to 1; draft_ids: k ≥ 1, id i drawn from draft[i].
    If the residual is zero after rounding, p and q are equal, and the token is drawn from p.
    """
    device = target.device
    drawn = ops.operations(device).reject_drafts(
        target[None],
        draft[None],
        torch.tensor([draft_ids], dtype=torch.int64).to(device),
        torch.tensor([len(draft_ids)], dtype=torch.int32).to(device),
        torch.tensor([signed(stream(seed))], dtype=torch.int64).to(device),
        torch.tensor([position], dtype=torch.int64).to(device),
    )
    token_ids = [token_id for token_id in drawn[0].tolist() if token_id != ops.NO_TOKEN]
    return StepOutput(token_ids=token_ids) if token_ids else StepOutput(error=NOT_FINITE)
