"""Checkpointing strategies: a table of policies (:mod:`.policy`) over one :mod:`.engine`."""

from gockpt.strategies.policy import POLICIES, Policy, policy

__all__ = ["POLICIES", "Policy", "policy"]
