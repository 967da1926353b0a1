// SPDX-License-Identifier: Apache-2.0
//
// The conformance suite: each sentence that the project relies on about a CUDA driver, once, run against
// the simulated driver by default and against the installed one with RESIDENCY_CONFORMANCE_DRIVER=cuda.
// The cases are in conformance_memory.cc, conformance_processes.cc and conformance_streams.cc.
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/conformance_rig.h"

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], "--other_process") != 0) return Catch::Session().run(argc, argv);
  try {
    return residency::RunOtherProcess(3);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the other process: %s\n", error.what());
    return 1;
  }
}
