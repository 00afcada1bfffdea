"""Many plans: each one a ``memprof plan`` of its own, kept by content; searches and sweeps over
them.

Runs in the launcher's process. One plan is a child process that leaves an ordinary run folder; what
is read of it is a ``plans.rows.PlanRow``.
"""
