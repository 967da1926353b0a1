// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/doctor_command.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/host_checks.h"
#include "client/ctl/proto_json.h"
#include "client/ctl/report.h"
#include "client/dial.h"
#include "mechanisms/open_driver.h"

namespace residency {
namespace {

std::string SimDirectory(const std::string& runtime_dir) {
  const char* directory = std::getenv("RESIDENCY_SIM_DIR");
  return directory != nullptr && *directory != '\0' ? directory : absl::StrCat(runtime_dir, "/sim");
}

std::string CheckText(const Check& check) {
  std::string text = absl::StrFormat("%-4s  %-13s  %s\n", CheckStateName(check.state), check.what, check.found);
  if (!check.advice.empty()) absl::StrAppend(&text, "      -> ", check.advice, "\n");
  return text;
}

nlohmann::ordered_json CheckToJson(const Check& check) {
  return {{"check", check.what},
          {"state", std::string(CheckStateName(check.state))},
          {"found", check.found},
          {"advice", check.advice}};
}

int Doctor(const GlobalFlags& flags, DriverKind kind) {
  const std::string runtime_dir = flags.runtime_dir.empty() ? DefaultRuntimeDir() : flags.runtime_dir;
  std::vector<Check> checks = CheckDriver(kind, SimDirectory(runtime_dir));
  for (std::vector<Check> more : {CheckHost(), CheckDaemon(runtime_dir, flags.timeout)}) {
    std::move(more.begin(), more.end(), std::back_inserter(checks));
  }
  nlohmann::ordered_json json = {{"checks", nlohmann::ordered_json::array()}};
  std::string text;
  bool failed = false;
  for (const Check& check : checks) {
    json["checks"].push_back(CheckToJson(check));
    absl::StrAppend(&text, CheckText(check));
    failed = failed || check.state == CheckState::kFail;
  }
  Print(flags.json ? absl::StrCat(JsonText(json), "\n") : text);
  return failed ? kExitRefused : kExitDone;
}

}  // namespace

void AddDoctorCommand(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto driver = std::make_shared<std::string>("cuda");
  CLI::App& command =
      *AddCommand(app, "doctor", "Looks at GPUs, limits and sockets of this machine; needs no daemon",
                  "residencyctl doctor --driver sim", chosen,
                  // The flag is one of the two, as CLI11 has checked.
                  [&flags, driver] { return Doctor(flags, *driver == "sim" ? DriverKind::kSim : DriverKind::kCuda); });
  command
      .add_option("--driver", *driver, "cuda, or sim for simulated cards ($RESIDENCY_SIM_DIR, else RUNTIME_DIR/sim)")
      ->check(CLI::IsMember({"cuda", "sim"}));
}

}  // namespace residency
