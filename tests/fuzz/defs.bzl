# SPDX-License-Identifier: Apache-2.0
"""One libFuzzer target for each tests/fuzz/NAME_fuzz.cc."""

def fuzz_target(name, deps, srcs = []):
    """A libFuzzer program of tests/fuzz/`name`.cc, which only --config=fuzz can build. See tests/fuzz/run.

    Args:
      name: ends in _fuzz.
      deps: what it feeds.
      srcs: further sources.
    """
    native.cc_binary(
        name = name,
        testonly = True,
        srcs = [
            name + ".cc",
            "fuzz_input.h",
        ] + srcs,
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps + ["@system//:absl"],
    )
