"""Calls that follow one another: what a cache, a chunk, a tree or a captured graph does.

A *session* holds the buffers of its calls for as long as it lives, so that every call has the same
tensors with other contents, as under a captured graph. Each of its methods is a step: it changes
what the buffers hold, calls the back end and judges the result by the oracle, sequence by sequence.
A list of steps is a `Walk`, which fails or not by itself: it is what a failure is reported with.

    session     what every session has: buffers, steps, judgement
    cache       keys in pages: append, truncate, evict, move, fork, share a prefix, free
    calls       lengths that change, chunked prefill, trees of drafts, other sequences beside
    machines    Hypothesis draws the steps (`RuleBasedStateMachine`)
    properties  the properties of `fa4 verify`
"""
