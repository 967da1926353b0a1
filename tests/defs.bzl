# SPDX-License-Identifier: Apache-2.0
"""One test binary for each tests/NAME_test.cc."""

def unit_test(
        name,
        deps,
        data = [],
        srcs = [],
        size = "small",
        tags = [],
        sanitizers = ["asan", "tsan"],
        main = True,
        args = []):
    """A Catch2 test of tests/`name`.cc.

    Args:
      name: ends in _test.
      deps: what it tests.
      data: files it reads, relative to the workspace.
      srcs: further sources.
      size: Bazel's, small is 60 s.
      tags: Bazel's; "gpu" for what also runs on a GPU, from the folder that deploy/bundle makes.
      sanitizers: with which deploy/test runs it once more.
      main: link Catch2's main; False where the test brings its own.
      args: of the test binary.
    """
    native.cc_test(
        name = name,
        srcs = [name + ".cc"] + srcs,
        data = data,
        size = size,
        tags = tags + sanitizers,
        args = args,
        deps = deps + ([":catch_main"] if main else []) + ["@system//:absl"],
    )
