// SPDX-License-Identifier: Apache-2.0
#include "tests/input_cases.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/daemon_rig.h"
#include "tests/test_process.h"

namespace residency {
namespace {

Verdict VerdictOf(const std::string& text) {
  if (text == "accept") return Verdict::kAccept;
  if (text == "reject") return Verdict::kReject;
  REQUIRE(text == "either");
  return Verdict::kEither;
}

InputCase CaseOf(const std::string& folder, const Json& row) {
  const Json& expected = row.at("expected");
  InputCase made{.name = row.at("name"),
                 .why = row.at("why"),
                 .path = folder + "/" + row.at("path").get<std::string>(),
                 .verdict = VerdictOf(expected.at("verdict")),
                 .tensor_count = expected.value("tensors", uint64_t{0}),
                 .payload_bytes = expected.value("bytes", uint64_t{0})};
  if (made.verdict == Verdict::kReject) {
    made.classes = expected.value("also_ok", std::set<std::string>());
    made.classes.insert(expected.at("reason").get<std::string>());
  }
  for (const Json& tensor : row.value("tensors", Json::array())) {
    made.tensors.push_back({.component = "",
                            .name = tensor.at("name"),
                            .dtype = tensor.at("dtype"),
                            .shape = tensor.at("shape").get<std::vector<uint64_t>>(),
                            .bytes = tensor.at("bytes"),
                            .sha256 = tensor.at("sha256")});
  }
  return made;
}

std::vector<InputCase> MakeCases(const std::string& folder) {
  TestProcess generator({ProgramPath("make_cases.py"), folder}, folder + ".errors");
  generator.EndInput();
  const std::string said = generator.ReadAll();
  INFO("make_cases.py: " << said << generator.Errors());
  REQUIRE(generator.Wait() == 0);
  std::ifstream file(folder + "/manifest.json");
  const Json manifest = Json::parse(file);
  REQUIRE(manifest.at("format") == 1);
  std::vector<InputCase> cases;
  for (const Json& row : manifest.at("cases")) cases.push_back(CaseOf(folder, row));
  return cases;
}

}  // namespace

const std::vector<InputCase>& InputCases() {
  static const ScratchDirectory directory;
  static const std::vector<InputCase> cases = MakeCases(directory.path() + "/cases");
  return cases;
}

}  // namespace residency
