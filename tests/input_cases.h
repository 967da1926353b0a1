// SPDX-License-Identifier: Apache-2.0
//
// The files that tests/make_cases.py writes, weird and well-formed ones, with what it says of them: plain Python that
// shares nothing with the code under test.
#ifndef RESIDENCY_TESTS_INPUT_CASES_H_
#define RESIDENCY_TESTS_INPUT_CASES_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/test_checkpoints.h"

namespace residency {

enum class Verdict { kAccept, kReject, kEither };

struct InputCase {
  std::string name;
  std::string why;
  std::string path;  // of the file or directory to register
  Verdict verdict = Verdict::kEither;
  std::set<std::string> classes;  // of a reject: the generator's names for what is wrong, any of which will do
  uint64_t tensor_count = 0;      // of an accept
  uint64_t payload_bytes = 0;
  std::vector<TrueTensor> tensors;  // of an accept with at most 64 of them, in no order
};

// All of them, which are written when they are first asked for and go when this process ends.
const std::vector<InputCase>& InputCases();

}  // namespace residency

#endif  // RESIDENCY_TESTS_INPUT_CASES_H_
