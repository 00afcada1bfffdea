"""Many plans, each a ``memprof plan`` of its own: searches and sweeps, kept by content.

Runs in the launcher's process. One plan is a child process that leaves an ordinary run folder; its
figures are a ``plans.model.PlanRow``.
"""
