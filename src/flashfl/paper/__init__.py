"""The paper's tables as data, the runs that reproduce them, and ours beside theirs."""
