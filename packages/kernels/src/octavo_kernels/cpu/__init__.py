"""CPU kernels: numba functions over SIMD values, compiled once per machine.

A module here imports numba and is imported only when one of its kernels has to be
compiled; `jit` and `threads` are the exceptions, and start what was compiled before.
"""
