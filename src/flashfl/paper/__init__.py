"""The paper's tables as data, the runs that reproduce them, and ours beside theirs."""

# In the order of the page, and of the runs of `flashfl reproduce --all --budget-minutes N`.
TABLES = (
    "main", "hetero", "r_int", "stage1", "nm", "savings", "feddst", "fedspa", "zerofl", "rivals_lr", "rivals", "wfa",
    "initialisation", "static_bn", "disagreement", "vgg16", "sst2",
)  # fmt: skip
