# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA toolkit: headers to compile against and nvcc to build GPU code with."""

def _find(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "")
    roots = ([home] if home else []) + ["/usr/local/cuda"]
    for root in roots:
        if ctx.path(root + "/include/cuda.h").exists and ctx.path(root + "/bin/nvcc").exists:
            return root + "/include", root + "/bin/nvcc"

    # Debian's nvidia-cuda-toolkit.
    if ctx.path("/usr/include/cuda.h").exists and ctx.path("/usr/bin/nvcc").exists:
        return "/usr/include", "/usr/bin/nvcc"
    fail("No CUDA toolkit: looked for include/cuda.h and bin/nvcc in $CUDA_HOME and /usr/local/cuda, and " +
         "for Debian's nvidia-cuda-toolkit. deploy/install-deps installs one.")

def _cuda_toolkit_impl(ctx):
    include, nvcc = _find(ctx)
    for header in ["cuda.h", "cudaTypedefs.h"]:
        if ctx.path(include + "/" + header).exists:
            ctx.symlink(include + "/" + header, "include/" + header)
    version = ctx.execute([nvcc, "--version"])
    if version.return_code != 0:
        fail("%s --version failed: %s" % (nvcc, version.stderr))
    old = "release 11." in version.stdout

    # CUDA 13 dropped everything before sm_75. 11.8 knows sm_90 already, but not gcc 12.
    flags = ["-std=c++17", "-O3"]
    if old:
        flags += ["-ccbin", "g++-11", "-gencode", "arch=compute_52,code=compute_52"]
    else:
        flags += ["-gencode", "arch=compute_75,code=compute_75"]
    flags += ["-gencode", "arch=compute_90,code=sm_90"]
    ctx.file("nvcc.bzl", "NVCC = %r\nNVCC_FLAGS = %r\n" % (nvcc, " ".join(flags)))
    ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])
cc_library(
    name = "headers",
    hdrs = glob(["include/*.h"]),
    includes = ["include"],
)
""")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
