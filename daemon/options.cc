// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "daemon/runtime_dir.h"
#include "daemon/socket_group.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/units.h"
#include "mechanisms/version.h"

namespace residency {
namespace {

// A check that also parses: CLI11 prints what it returns, beside the flag's name.
template <typename T, typename Parse>
std::function<std::string(const std::string&)> Into(T& target, Parse parse) {
  return [&target, parse](const std::string& text) -> std::string {
    auto value = parse(text);
    if (!value.ok()) return std::string(value.status().message());
    target = *value;
    return "";
  };
}

absl::StatusOr<uint64_t> ParseCellBytes(const std::string& text) {
  auto bytes = ParseBytes(text);
  if (!bytes.ok()) return bytes;
  if (*bytes < kMinCellBytes || *bytes > kMaxCellBytes || (*bytes & (*bytes - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(*bytes, " bytes: a cell is a power of two from ", kMinCellBytes, " to ", kMaxCellBytes, " bytes"));
  }
  return bytes;
}

absl::StatusOr<PinPolicy> ParsePinPolicy(const std::string& text) {
  if (text == "auto") return PinPolicy::kAuto;
  if (text == "yes") return PinPolicy::kYes;
  if (text == "no") return PinPolicy::kNo;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "': auto, yes or no"));
}

absl::StatusOr<bool> ParseNvml(const std::string& text) {
  if (text == "auto" || text == "no") return text == "auto";
  return absl::InvalidArgumentError(absl::StrCat("'", text, "': auto or no"));
}

absl::StatusOr<HostTier> ParseHostTier(const std::string& text) {
  if (text == "mirror") return HostTier::kMirror;
  if (text == "file") return HostTier::kFile;
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "': mirror or file", text == "none" ? "; none is not offered yet" : ""));
}

}  // namespace

ParsedOptions ParseOptions(int argc, char** argv) {
  DaemonOptions options;
  options.runtime_dir = DefaultRuntimeDir();
  options.broker.device_reserve_bytes = 512 * kMiB;
  options.broker.version = kVersion;
  CLI::App app("Owns the GPUs of this host so that many models and processes can share them.", "residencyd");
  app.footer(
      "Example, without a GPU:\n  residencyd --driver=sim --runtime_dir=/tmp/r --sim_device_bytes=4GiB\n\n"
      "Sizes: 12GiB, 500MB or plain bytes. Durations: 500ms, 5s, 1m.");
  app.set_version_flag("--version", absl::StrCat("residencyd ", kVersion));
  app.add_option("--runtime_dir", options.runtime_dir, "Holds grpc.sock, pages.sock and lock")->capture_default_str();
  std::string text;  // CLI11 wants somewhere to put the text that the checks parse
  app.add_option("--socket_group", text,
                 "Group that may connect, a name or a number (default: as root 'residency' where it exists, else the "
                 "process's own)")
      ->type_name("GROUP")
      ->check(Into(options.socket_group, ParseGroup));
  const auto bytes = [](const std::string& value) { return ParseBytes(value); };
  const auto duration = [](const std::string& value) { return ParseDuration(value); };
  app.add_option("--driver", text, "cuda, or sim: real pages, no GPU (never chosen by itself; default cuda)")
      ->type_name("cuda|sim")
      ->check(Into(options.driver, [](const std::string& value) { return ParseDriverKind(value); }));
  app.add_option("--sim_devices", options.sim.devices, "Number of simulated GPUs")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--sim_device_bytes", text, "Memory of each simulated GPU (default 16GiB)")
      ->type_name("SIZE")
      ->check(Into(options.sim.device_bytes, bytes));
  app.add_option("--sim_link_bytes_per_second", text, "Speed of the simulated link (default 0: unthrottled)")
      ->type_name("SIZE")
      ->check(Into(options.sim.link_bytes_per_second, bytes));
  app.add_option("--sim_context_bytes", text, "Charged for each process with a context (default 0)")
      ->type_name("SIZE")
      ->check(Into(options.sim.context_bytes, bytes));
  app.add_option("--sim_faults", options.sim.faults, "Calls to fail or delay, e.g. cuMemCreate@3=OUT_OF_MEMORY")
      ->type_name("SPEC");
  app.add_option("--nvml", text, "Whether status asks NVML what each process has: auto (default) where it is there, no")
      ->type_name("auto|no")
      ->check(Into(options.use_nvml, ParseNvml));
  app.add_option("--device_budget", text, "Most bytes the broker holds on each GPU (default: all)")
      ->type_name("SIZE")
      ->check(Into(options.broker.device_budget_bytes, bytes));
  app.add_option("--device_reserve", text, "Bytes left free for others on each GPU (default 512MiB)")
      ->type_name("SIZE")
      ->check(Into(options.broker.device_reserve_bytes, bytes));
  app.add_option("--host_budget", text, "Most host bytes of registered models (default: what host and cgroup leave)")
      ->type_name("SIZE")
      ->check(Into(options.broker.host_budget_bytes, bytes));
  app.add_option("--host_tier", text,
                 "Where models are in host memory: mirror, a copy of their own (default), or file, the weight files "
                 "themselves, mapped and page-locked")
      ->type_name("mirror|file")
      ->check(Into(options.broker.tier, ParseHostTier));
  app.add_option("--pin", text, "Page-lock models' host copies: auto where there is twice the room (default), yes, no")
      ->type_name("auto|yes|no")
      ->check(Into(options.broker.pin, ParsePinPolicy));
  app.add_option("--pool_idle", text, "After which idle cells go back to the driver (default 10s)")
      ->type_name("DURATION")
      ->check(Into(options.broker.pool_idle, duration));
  app.add_option("--cell_bytes", text, "Size of a cell, a power of two from 2MiB to 256MiB (default 64MiB)")
      ->type_name("SIZE")
      ->check(Into(options.broker.cell_bytes, ParseCellBytes));
  auto* const record = app.add_option("--record", options.broker.record_path,
                                      "Keep all that is decided, and on what, in a new file, for --replay")
                           ->type_name("FILE");
  app.add_option("--replay", options.replay_path,
                 "Decide again what a recording holds, say whether it is the same, end")
      ->type_name("FILE")
      ->excludes(record);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11's own statuses are over 100; ours for a usage error is 2.
    return {std::nullopt, app.exit(error) == 0 ? 0 : 2};
  }
  const char* sim_directory = std::getenv("RESIDENCY_SIM_DIR");
  options.sim.directory =
      sim_directory != nullptr && *sim_directory != '\0' ? sim_directory : absl::StrCat(options.runtime_dir, "/sim");
  return {std::move(options), 0};
}

}  // namespace residency
