"""A ledger of what one step costs on an Apple GPU, computed without one."""
