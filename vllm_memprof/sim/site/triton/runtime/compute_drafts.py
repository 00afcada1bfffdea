"""Kernels of vllm-ascend that accept or reject drafted tokens.

They have no limit: a request without a token would never go on. Probabilities above
``host_compute_bytes`` were not computed, and only read for a drafted token; the token in a rejected
one's place then is the first of the vocabulary. (vllm_ascend/ops/triton/reject_sample.py, 0.23.0)
Torch is imported once one of them runs.
"""

from .._host import device_profile
from .marks import writes


def _requests(ends, skipped=None):
    """Row of each request that is not skipped, and where its tokens begin and end."""
    begin = 0
    for row, end in enumerate(ends.tolist()):
        if skipped is None or not skipped[row]:
            yield row, begin, end
        begin = end


def _write(output, row, tokens):
    """Writes the tokens of a request; behind them stays what was there."""
    for at, token in enumerate(tokens):
        output[row, at] = token


@writes("output_token_ids_ptr", any_size=True)
def _greedy(
    output_token_ids_ptr,
    draft_token_ids_ptr,
    target_argmax_ptr,
    bonus_token_ids_ptr,
    cu_num_draft_tokens_ptr=None,
    is_greedy_ptr=None,
    **_,
):
    """The model's own tokens up to the first that was not drafted; one more if all were."""
    import torch

    drafted, own = draft_token_ids_ptr.tolist(), target_argmax_ptr.view(-1).tolist()
    one_each = torch.arange(1, len(drafted) + 1, device="cpu")
    ends = one_each if cu_num_draft_tokens_ptr is None else cu_num_draft_tokens_ptr
    others = None if is_greedy_ptr is None else is_greedy_ptr == 0
    for row, begin, end in _requests(ends, others):
        wrong = (at for at in range(begin, end) if drafted[at] != own[at])
        last = next(wrong, None)
        tokens = own[begin : end if last is None else last + 1]
        bonus = [int(bonus_token_ids_ptr.view(-1)[row])] if last is None else []
        _write(output_token_ids_ptr, row, tokens + bonus)


def _chances(
    token,
    drafted,
    draft_probs_ptr=None,
    target_probs_ptr=None,
    target_indices_ptr=None,
    uniform_probs_ptr=None,
    ori_target_probs_ptr=None,
    ENABLE_REDUCE_SAMPLING=False,
    ENTROPY_VERIFY=False,
    POSTERIOR_THRESHOLD=0.95,
    POSTERIOR_ALPHA=0.4,
    EPSILON=1e-10,
    **_,
):
    """Of a drafted token: the model's probability, the drafter's, a random number, its factor."""
    import torch

    target = target_probs_ptr[token]
    if ENABLE_REDUCE_SAMPLING:
        own = float((target * (target_indices_ptr[token] == drafted)).sum())
    else:
        own = float(target[drafted])
    theirs = 1.0 if draft_probs_ptr is None else float(draft_probs_ptr[token, drafted])
    factor = 1.0
    if ENTROPY_VERIFY and not ENABLE_REDUCE_SAMPLING:
        known = target if ori_target_probs_ptr is None else ori_target_probs_ptr[token]
        entropy = -(known * torch.log(known + EPSILON)).sum()
        factor = min(float(torch.exp(-entropy * POSTERIOR_ALPHA)), POSTERIOR_THRESHOLD)
    return own, theirs, float(uniform_probs_ptr[token]), factor


def _up_to_a_rejected(drafted, begin, end, given):
    """Drafted tokens up to the first that is rejected."""
    for token in range(begin, end):
        if drafted[token] == -1:
            return token
        own, theirs, number, factor = _chances(token, drafted[token], **given)
        if theirs <= 0 or own / theirs < number * factor:
            return token
    return end


def _up_to_a_likely(drafted, begin, end, given):
    """Drafted tokens up to the last whose whole beginning is likely enough."""
    accepted, likely, asked = begin, 1.0, 1.0
    for token in range(begin, end):
        if drafted[token] == -1:
            likely = 0.0
            continue
        own, theirs, number, factor = _chances(token, drafted[token], **given)
        asked *= number
        likely = min(likely * own / theirs, 1.0) if theirs > 0 else 0.0
        if theirs > 0 and likely >= asked * factor:
            accepted = token + 1
    return accepted


def _random(accepted):
    """Drafted tokens up to what ``accepted`` answers, and one in the next one's place."""

    @writes("output_token_ids_ptr", any_size=True)
    def kernel(
        output_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        draft_token_ids_ptr,
        bonus_token_ids_ptr,
        recovered_token_ids_ptr,
        is_greedy_ptr,
        **given,
    ):
        drafted = draft_token_ids_ptr.tolist()
        for row, begin, end in _requests(cu_num_draft_tokens_ptr, is_greedy_ptr):
            at = accepted(drafted, begin, end, given)
            more = recovered_token_ids_ptr[at] if at < end else bonus_token_ids_ptr.view(-1)[row]
            _write(output_token_ids_ptr, row, [*drafted[begin:at], int(more)])

    return kernel


@writes("output_token_ids_ptr", any_size=True)
def _recovered(
    output_token_ids_ptr,
    cu_num_draft_tokens_ptr,
    draft_token_ids_ptr,
    draft_probs_ptr,
    target_probs_ptr,
    target_indices_ptr,
    q_ptr,
    ENABLE_REDUCE_SAMPLING=False,
    **_,
):
    """The token in the place of each drafted one: drawn from what the drafter underrates."""
    if target_probs_ptr.nbytes > int(device_profile().get("host_compute_bytes") or 0):
        output_token_ids_ptr.zero_()
        return
    for row, begin, end in _requests(cu_num_draft_tokens_ptr):
        for at in range(begin, end):
            chances = target_probs_ptr[at].float()
            ids = target_indices_ptr[at] if ENABLE_REDUCE_SAMPLING else None
            if draft_probs_ptr is not None:
                theirs = draft_probs_ptr[at] if ids is None else draft_probs_ptr[at][ids.long()]
                chances = (chances - theirs).clamp(min=0)
            elif ids is not None:
                chances = chances.masked_fill(ids == draft_token_ids_ptr[at], 0)
            else:
                chances = chances.clone()
                chances[int(draft_token_ids_ptr[at])] = 0
            best = int((chances / q_ptr[row]).argmax())
            output_token_ids_ptr[at] = best if ids is None else int(ids[best])


@writes("output_ptr", any_size=True)
def _expand(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to, **_):
    """A request's value for each of its tokens."""
    for row, begin, end in _requests(cu_num_tokens_ptr):
        value = input_ptr[row].item()
        output_ptr[begin:end] = replace_to if value == replace_from else value


ROWS = {
    "rejection_greedy_sample_spec_len_1_triton": _greedy,
    "rejection_greedy_sample_triton": _greedy,
    "rejection_random_sample_kernel": _random(_up_to_a_rejected),
    "rejection_random_sample_block_verify_kernel": _random(_up_to_a_likely),
    "sample_recovered_tokens_kernel": _recovered,
    "expand_kernel": _expand,
}
