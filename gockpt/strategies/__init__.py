"""Checkpointing strategies: a table of policies over one engine. See :mod:`.policy` and :mod:`.engine`."""

from gockpt.strategies.policy import POLICIES, Policy, policy

__all__ = ["POLICIES", "Policy", "policy"]
