"""The family of blocked GEMM algorithms: what varies is data (isa, variants, tiles), what does not is one generator.

``isa``, ``variants`` and ``tiles`` are plain tables and import nothing heavy; only ``codegen``, ``generator`` and the
parts that they emit use TVM, and those are imported by a build process, never by a user's.
"""
