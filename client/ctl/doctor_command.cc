// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/doctor_command.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/card_figures.h"
#include "client/ctl/card_figures_text.h"
#include "client/ctl/host_checks.h"
#include "client/ctl/progress.h"
#include "client/ctl/proto_json.h"
#include "client/ctl/report.h"
#include "client/dial.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

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

struct DoctorFlags {
  std::string driver = "cuda";
  bool measure = false;
  bool report = false;
  std::string device_uuid;
  std::optional<uint64_t> bytes;
  std::optional<uint64_t> sim_link_bytes_per_second;
};

std::string RuntimeDir(const GlobalFlags& flags) {
  return flags.runtime_dir.empty() ? DefaultRuntimeDir() : flags.runtime_dir;
}

int Measure(const GlobalFlags& flags, const DoctorFlags& options, DriverKind kind) {
  SimOptions sim = SimOptionsFor(SimDirectory(RuntimeDir(flags)));
  sim.link_bytes_per_second = options.sim_link_bytes_per_second.value_or(0);
  if (kind == DriverKind::kSim && !HasSimCards(sim.directory)) {
    return ReportError(flags, Refuse(absl::StatusCode::kUnavailable, "NO_DEVICE",
                                     absl::StrCat("there are no simulated cards in ", sim.directory)));
  }
  const auto driver = OpenDriver(kind, sim);
  if (!driver.ok()) return ReportError(flags, driver.status());
  const auto device =
      options.device_uuid.empty() ? Device::Open(*driver, 0) : Device::OpenByUuid(*driver, options.device_uuid);
  if (!device.ok()) return ReportError(flags, device.status());
  const absl::StatusOr<CardFigures> figures = [&] {
    std::optional<Spinner> spinner;
    return MeasureCard(**device, options.bytes.value_or(kMeasureBytes),
                       [&spinner](const std::string& stage) { spinner.emplace(stage); });
  }();
  if (!figures.ok()) return ReportError(flags, figures.status());
  if (flags.json) {
    Print(absl::StrCat(JsonText(CardFiguresToJson(*figures, /*with_uuid=*/!options.report)), "\n"));
  } else {
    Print(options.report ? CardReportText(*figures) : CardFiguresText(*figures));
  }
  return kExitDone;
}

int Doctor(const GlobalFlags& flags, DriverKind kind) {
  const std::string runtime_dir = RuntimeDir(flags);
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
  auto options = std::make_shared<DoctorFlags>();
  CLI::App& command = *AddCommand(
      app, "doctor", "Looks at GPUs, limits and sockets of this machine, or measures a GPU; needs no daemon",
      "residencyctl doctor --driver sim\n  residencyctl doctor --measure --report", chosen, [&flags, options] {
        // The flag is one of the two, as CLI11 has checked.
        const DriverKind kind = options->driver == "sim" ? DriverKind::kSim : DriverKind::kCuda;
        return options->measure ? Measure(flags, *options, kind) : Doctor(flags, kind);
      });
  CLI::Option* const measure = command.add_flag(
      "--measure", options->measure,
      "measures, in a CUDA context of its own, copies, page-locking, digests and what a cell of each size costs; takes "
      "some seconds, and gives all memory back");
  command.add_flag("--report", options->report, "measures for others: names neither the machine nor the card")
      ->needs(measure);
  command.add_option("--device", options->device_uuid, "the GPU to measure; the first one if not given")
      ->type_name("UUID")
      ->needs(measure);
  AddBytes(command, "--bytes", options->bytes, "most that one copy has, 16MiB or more; 1GiB if not given")
      ->needs(measure)
      ->check([](const std::string& text) {
        const auto bytes = ParseBytes(text);
        return !bytes.ok() || *bytes >= kLeastMeasureBytes ? "" : absl::StrCat(text, " is less than 16MiB");
      });
  AddBytes(command, "--sim_link_bytes_per_second", options->sim_link_bytes_per_second,
           "speed of the simulated link, of which each process has its own; unthrottled if not given")
      ->needs(measure);
  command
      .add_option("--driver", options->driver,
                  "cuda, or sim for simulated cards ($RESIDENCY_SIM_DIR, else RUNTIME_DIR/sim)")
      ->check(CLI::IsMember({"cuda", "sim"}));
}

}  // namespace residency
