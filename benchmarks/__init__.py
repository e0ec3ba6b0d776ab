"""Benchmarks against NumPy and other BLAS libraries: ``python -m benchmarks --list`` in a checkout.

A suite (``suites``) is a table of shapes with a target. The runner (``runner``) times each shape against the
peers (``peers``) in interleaved rounds, as ratios, and relates it to the measured peak of a core (``peak``).
The report (``report``) carries what is needed to judge the numbers and to take them again.
"""
