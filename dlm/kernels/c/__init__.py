"""The kernels in C: `native` binds them; `built` and `compiler` make and keep the library."""
