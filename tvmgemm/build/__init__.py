"""Building kernels in a child process, so that TVM and a crashing compiler stay out of the user's program.

``parent`` says what to build and hands out the results, ``process`` runs the child; ``child`` compiles, links and
stores; ``link`` finds and runs the linker. Nothing is imported here: ``child`` must not load what only the parent needs.
"""
