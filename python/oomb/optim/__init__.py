"""Optimizers beside the engine: states that the host keeps."""

from oomb.optim.host_states import HostStates

__all__ = ["HostStates"]
