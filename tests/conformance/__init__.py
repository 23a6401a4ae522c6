"""Our functions against what others wrote: every layer, operation and loss of a library is a row.

python -m tests.conformance.gradients [TABLE ...]     counts, and every row that is not right
"""
