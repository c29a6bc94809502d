"""The kernels in C: `native` and `products` call them through `binding`; `built` and `compiler` make and keep the library."""
