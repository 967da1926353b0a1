// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/host_checks.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/ctl/report.h"
#include "client/dial.h"
#include "mechanisms/device.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// A cell is a descriptor while it travels and in the daemon for good: 16384 of 64 MiB are 1 TiB.
constexpr uint64_t kGoodOpenFiles = 16384;

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string LimitText(rlim_t limit, bool bytes) {
  if (limit == RLIM_INFINITY) return "unlimited";
  return bytes ? FormatBytes(limit) : absl::StrCat(limit);
}

Check CheckGpu(const Driver& driver, int ordinal) {
  Check check{.what = absl::StrCat("gpu ", ordinal)};
  auto device = Device::Open(driver, ordinal);
  absl::Status status = device.status();
  if (status.ok()) {
    const DeviceInfo& info = (*device)->info();
    check.found = absl::StrFormat("%s %s, driver %d.%d, granule %s", info.uuid, info.name, info.driver_version / 1000,
                                  info.driver_version % 1000 / 10, FormatBytes(info.granule_bytes));
    auto memory = (*device)->Memory();
    if (memory.ok()) {
      absl::StrAppend(&check.found, ", ", FormatBytes(memory->free_bytes), " free of ",
                      FormatBytes(memory->total_bytes));
    }
    status = memory.ok() ? (*device)->Probe() : memory.status();
  }
  if (status.ok()) return check;
  check.state = CheckState::kFail;
  absl::StrAppend(&check.found, check.found.empty() ? "" : ": ", RefusalLine(status));
  check.advice = ReasonOf(status) == "NO_EXPORT"
                     ? "no process but the daemon could map its models, so activations are refused; the GPU, or the "
                       "profile of a virtual one, has to export memory"
                     : "update the NVIDIA driver, or free the GPU's memory, and run doctor again";
  return check;
}

Check CheckOpenFiles() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  Check check{.what = "open files"};
  check.found = absl::StrCat("soft ", LimitText(limit.rlim_cur, false), ", hard ", LimitText(limit.rlim_max, false));
  if (limit.rlim_max < kGoodOpenFiles) {
    check.state = CheckState::kWarn;
    check.advice = absl::StrCat("raise the hard limit to ", kGoodOpenFiles,
                                " or more (LimitNOFILE= in the unit): every cell is a descriptor");
  }
  return check;
}

Check CheckLockedMemory() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  Check check{.what = "locked memory"};
  check.found = absl::StrCat("soft ", LimitText(limit.rlim_cur, true), ", hard ", LimitText(limit.rlim_max, true));
  if (limit.rlim_max != RLIM_INFINITY) {
    check.state = CheckState::kWarn;
    check.advice = "LimitMEMLOCK=infinity in the daemon's unit: some drivers and io_uring count page-locked bytes";
  }
  return check;
}

Check CheckUring() {
  Check check{.what = "io_uring", .found = "works"};
  io_uring_params params{};
  const UniqueFd ring(static_cast<int>(syscall(SYS_io_uring_setup, 1, &params)));
  if (!ring.valid()) {
    check.state = CheckState::kWarn;
    check.found = absl::StrCat("refused: ", ErrnoStatus(errno, "io_uring_setup").message());
    check.advice =
        "files are read by threads instead; allow it by kernel.io_uring_disabled=0 or the container's seccomp";
  }
  return check;
}

Check CheckHugePages() {
  Check check{.what = "huge pages"};
  const std::string chosen = ChosenWord(ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  check.found = absl::StrCat("shmem_enabled ", chosen.empty() ? "unknown" : chosen);
  if (chosen.empty() || chosen == "never" || chosen == "deny") {
    check.state = CheckState::kWarn;
    check.advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: page-locking is faster";
  }
  return check;
}

}  // namespace

std::string_view CheckStateName(CheckState state) {
  switch (state) {
    case CheckState::kOk:
      return "OK";
    case CheckState::kWarn:
      return "WARN";
    case CheckState::kFail:
      break;
  }
  return "FAIL";
}

std::string ChosenWord(std::string_view text) {
  const size_t open = text.find('[');
  const size_t close = text.find(']', open);
  if (open == std::string_view::npos || close == std::string_view::npos) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

SimOptions SimOptionsFor(const std::string& sim_directory) {
  SimOptions sim;
  sim.directory = sim_directory;
  if (const char* faults = std::getenv("RESIDENCY_SIM_FAULTS"); faults != nullptr) sim.faults = faults;
  return sim;
}

bool HasSimCards(const std::string& sim_directory) {
  struct stat status {};
  return stat(sim_directory.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::vector<Check> CheckDriver(DriverKind kind, const std::string& sim_directory) {
  Check opened{.what = "driver", .found = std::string(DriverKindName(kind))};
  if (kind == DriverKind::kSim) {
    absl::StrAppend(&opened.found, " in ", sim_directory);
    if (!HasSimCards(sim_directory)) {
      opened.state = CheckState::kFail;
      absl::StrAppend(&opened.found, ": there are no simulated cards");
      opened.advice = "start residencyd --driver=sim, which makes them, or set RESIDENCY_SIM_DIR";
      return {opened};
    }
  }
  // Devices refer to the table, and the process ends soon.
  static Driver driver;
  auto table = OpenDriver(kind, SimOptionsFor(sim_directory));
  absl::StatusOr<int> count = 0;
  if (table.ok()) {
    driver = *table;
    count = Device::Count(driver);
  }
  const absl::Status status = table.ok() ? count.status() : table.status();
  if (!status.ok() || *count == 0) {
    opened.state = CheckState::kFail;
    absl::StrAppend(&opened.found, ": ", status.ok() ? "it shows no GPU" : RefusalLine(status));
    opened.advice = kind == DriverKind::kSim
                        ? "look at RESIDENCY_SIM_DIR and RESIDENCY_SIM_FAULTS"
                        : "install the NVIDIA driver, or try the simulated one: residencyctl doctor --driver sim";
    return {opened};
  }
  std::vector<Check> checks = {std::move(opened)};
  for (int ordinal = 0; ordinal < *count; ++ordinal) checks.push_back(CheckGpu(driver, ordinal));
  return checks;
}

std::vector<Check> CheckHost() { return {CheckOpenFiles(), CheckLockedMemory(), CheckUring(), CheckHugePages()}; }

std::vector<Check> CheckDaemon(const std::string& runtime_dir, absl::Duration timeout) {
  Check check{.what = "daemon", .found = absl::StrCat("answers on ", GrpcSocketPath(runtime_dir))};
  if (auto channel = DialDaemon(runtime_dir, absl::Now() + timeout); !channel.ok()) {
    check.state = CheckState::kWarn;
    check.found = RefusalLine(channel.status());
    check.advice = "start residencyd, or name its directory with --runtime_dir";
  }
  return {check};
}

}  // namespace residency
