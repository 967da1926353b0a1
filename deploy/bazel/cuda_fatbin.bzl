# SPDX-License-Identifier: Apache-2.0
"""Builds a .cu file to a fat binary and embeds it as the bytes of a C array."""

load("@cuda//:nvcc.bzl", "NVCC", "NVCC_FLAGS")

def cuda_fatbin(name, src, hdrs, out):
    """The bytes of `src`'s fat binary, comma-separated, in the file `out`, for an #include in an array."""
    native.genrule(
        name = name,
        srcs = [src] + hdrs,
        outs = [out],
        cmd = ("%s %s -fatbin -I. -o $@.fatbin $(location %s) && " % (NVCC, NVCC_FLAGS, src) +
               "od -An -v -tx1 $@.fatbin | sed 's/ \\([0-9a-f][0-9a-f]\\)/0x\\1,/g' > $@ && rm $@.fatbin"),
    )
