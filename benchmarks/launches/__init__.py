"""The cost of a step on an Apple GPU, computed without one."""
