// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/card_figures.h"

#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "mechanisms/digester.h"
#include "mechanisms/host_memory.h"
#include "mechanisms/refusal.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr uint64_t kCellSizes[] = {2 * kMiB, 32 * kMiB, 64 * kMiB, 128 * kMiB, 256 * kMiB};
constexpr uint64_t kMostCells = 16;
constexpr int kRounds = 5;
constexpr int kTimes = 7;
// A slow link is not waited for so often.
constexpr absl::Duration kPatience = absl::Seconds(2);
// What a context, the digest's kernel and its buffers take beside.
constexpr uint64_t kBesideBytes = 32 * kMiB;
constexpr uint64_t kGranuleBytes = 2 * kMiB;

using Clock = std::chrono::steady_clock;

// How long `work` takes, which ends when what it began has ended.
template <typename Work>
absl::StatusOr<absl::Duration> Time(Work work) {
  const Clock::time_point began = Clock::now();
  if (absl::Status status = work(); !status.ok()) return status;
  return absl::FromChrono(Clock::now() - began);
}

double PerSecond(uint64_t bytes, absl::Duration duration) {
  return static_cast<double>(bytes) / std::max(absl::ToDoubleSeconds(duration), 1e-9);
}

template <typename T>
T Median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// `work` once to warm up, and then kTimes, or once and as often as there is patience for.
template <typename Work>
absl::StatusOr<Rate> MeasureRate(uint64_t bytes, Work work) {
  std::vector<double> rates;
  absl::Duration all;
  for (int i = 0; i <= 1 || (i <= kTimes && all < kPatience); ++i) {
    const auto duration = Time(work);
    if (!duration.ok()) return duration.status();
    all += *duration;
    if (i > 0) rates.push_back(PerSecond(bytes, *duration));
  }
  const auto [least, most] = std::minmax_element(rates.begin(), rates.end());
  return Rate{Median(rates), *least, *most, rates.size()};
}

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return std::string(absl::StripAsciiWhitespace(line));
}

// Memory as the daemon has it for its host copies: pages of a memfd, huge ones where the system gives them.
class HostBuffer {
 public:
  static absl::StatusOr<HostBuffer> Make(uint64_t bytes) {
    const UniqueFd fd(memfd_create("residency-measure", MFD_CLOEXEC));
    if (!fd.valid()) return ErrnoStatus(errno, "memfd_create");
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return ErrnoStatus(errno, "ftruncate");
    void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (address == MAP_FAILED) return ErrnoStatus(errno, "mmap");
    (void)madvise(address, bytes, MADV_HUGEPAGE);
    return HostBuffer(static_cast<std::byte*>(address), bytes);
  }
  HostBuffer(HostBuffer&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  HostBuffer& operator=(HostBuffer&&) = delete;
  ~HostBuffer() {
    if (address_ != nullptr) munmap(address_, bytes_);
  }

  std::byte* address() const { return address_; }

  absl::Status FaultIn() const {
    if (madvise(address_, bytes_, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
    if (errno == ENOMEM || errno == EFAULT) {
      return Refuse(absl::StatusCode::kResourceExhausted, {.reason = "HOST_MEMORY", .needed_bytes = bytes_},
                    absl::StrCat("the system gave less than ", bytes_, " bytes of host memory"));
    }
    // Kernels before 5.14 do not know it.
    constexpr uint64_t kPageBytes = 4096;
    for (uint64_t offset = 0; offset < bytes_; offset += kPageBytes) address_[offset] = std::byte{1};
    return absl::OkStatus();
  }

  // How much of it the kernel maps by huge pages.
  uint64_t HugePageBytes() const {
    std::ifstream maps("/proc/self/smaps");
    const std::string begin = absl::StrFormat("%x-", reinterpret_cast<uintptr_t>(address_));
    bool ours = false;
    for (std::string line; std::getline(maps, line);) {
      // A mapping's own line begins with its address in small digits, the lines about it with a capital.
      if (!absl::ascii_isupper(line.empty() ? ' ' : line.front())) ours = absl::StartsWith(line, begin);
      uint64_t kibibytes = 0;
      if (ours && absl::StartsWith(line, "ShmemPmdMapped:")) {
        const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
        if (words.size() > 1 && absl::SimpleAtoi(words[1], &kibibytes)) return kibibytes * kKiB;
      }
    }
    return 0;
  }

 private:
  HostBuffer(std::byte* address, uint64_t bytes) : address_(address), bytes_(bytes) {}

  std::byte* address_;
  const uint64_t bytes_;
};

absl::StatusOr<uint64_t> ChooseBytes(const Device& device, uint64_t most_bytes) {
  const auto memory = device.Memory();
  if (!memory.ok()) return memory.status();
  const auto refuse = [](const char* reason, const std::string& where, uint64_t available_bytes) {
    return Refuse(absl::StatusCode::kResourceExhausted,
                  {.reason = reason, .needed_bytes = kLeastMeasureBytes, .available_bytes = available_bytes},
                  absl::StrCat("a measurement needs at least ", kLeastMeasureBytes, " bytes ", where, "; ",
                               available_bytes, " are free"));
  };
  const uint64_t device_bytes = SaturatingSubtract(memory->free_bytes, kBesideBytes);
  if (device_bytes < kLeastMeasureBytes) return refuse("GPU_MEMORY", "of " + device.info().uuid, device_bytes);
  const uint64_t host_bytes = ReadHostMemory().room_bytes().value_or(most_bytes);
  if (host_bytes < kLeastMeasureBytes) return refuse("HOST_MEMORY", "of host memory", host_bytes);
  return std::max(std::min({most_bytes, device_bytes, host_bytes}) / kGranuleBytes * kGranuleBytes, kLeastMeasureBytes);
}

absl::Status MeasureBytes(const Device& device, const std::function<void(const std::string&)>& stage,
                          CardFigures& figures) {
  const uint64_t bytes = figures.measured_bytes;
  stage("measuring host memory");
  const auto buffer = HostBuffer::Make(bytes);
  if (!buffer.ok()) return buffer.status();
  const auto faulted = Time([&] { return buffer->FaultIn(); });
  if (!faulted.ok()) return faulted.status();
  figures.fault_in_bytes_per_second = PerSecond(bytes, *faulted);
  figures.huge_page_bytes = buffer->HugePageBytes();
  HostRegistration locked;
  const auto registered = Time([&] {
    auto registration = device.RegisterHost(buffer->address(), bytes);
    if (registration.ok()) locked = *std::move(registration);
    return registration.status();
  });
  if (!registered.ok()) return registered.status();
  figures.page_lock_bytes_per_second = PerSecond(bytes, *registered);

  stage("measuring copies to the GPU");
  auto target = device.Allocate(bytes);
  if (!target.ok()) return target.status();
  auto stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  const auto copied = MeasureRate(bytes, [&] {
    absl::Status status = device.CopyToDevice(target->get(), buffer->address(), bytes, *stream);
    return status.ok() ? device.Synchronize(*stream) : status;
  });
  if (!copied.ok()) return copied.status();
  figures.copy = *copied;

  stage("measuring digests");
  const auto digester = Digester::Create(device);
  if (!digester.ok()) return digester.status();
  std::vector<DigestItem> items;
  constexpr uint64_t kItemBytes = 64 * kMiB;
  for (uint64_t offset = 0; offset < bytes; offset += kItemBytes) {
    items.push_back({target->get() + offset, std::min(kItemBytes, bytes - offset) / 8, 0});
  }
  const auto digested = MeasureRate(bytes, [&] { return (*digester)->Digest(items).status(); });
  if (!digested.ok()) return digested.status();
  figures.digest = *digested;
  return absl::OkStatus();
}

// Of one round with `count` cells: the duration of each step, for one cell.
absl::StatusOr<CellFigures> OneRound(const Device& device, uint64_t bytes, uint64_t count) {
  CellFigures figures{.bytes = bytes};
  const auto range = device.Reserve(bytes * count);
  if (!range.ok()) return range.status();
  std::vector<CellMemory> cells;
  std::vector<UniqueFd> descriptors;
  std::vector<CellMemory> imported;
  // Each returns the duration for one cell. `step` is told which cell, and its address.
  const auto each = [&](absl::Duration& figure, auto step) -> absl::Status {
    const auto duration = Time([&] {
      absl::Status status;
      for (uint64_t i = 0; i < count && status.ok(); ++i) status = step(i, range->get() + i * bytes);
      return status;
    });
    if (duration.ok()) figure = *duration / static_cast<int64_t>(count);
    return duration.status();
  };
  const auto keep = [](auto made, auto& kept) {
    if (made.ok()) kept.push_back(*std::move(made));
    return made.status();
  };
  using Address = CUdeviceptr;
  absl::Status status = each(figures.create, [&](uint64_t, Address) { return keep(device.Create(bytes), cells); });
  if (status.ok()) {
    status = each(figures.map, [&](uint64_t i, Address address) { return device.Map(address, cells[i]); });
  }
  if (status.ok()) {
    status = each(figures.set_access,
                  [&](uint64_t, Address address) { return device.SetAccess(address, bytes, Access::kReadWrite); });
  }
  if (status.ok()) {
    status = each(figures.export_descriptor,
                  [&](uint64_t i, Address) { return keep(device.Export(cells[i]), descriptors); });
  }
  if (status.ok()) {
    absl::Duration import_descriptor;
    const absl::Status took = each(import_descriptor, [&](uint64_t i, Address) {
      return keep(device.Import(descriptors[i].get(), bytes), imported);
    });
    if (took.ok()) figures.import_descriptor = import_descriptor;
    imported.clear();
    descriptors.clear();
  }
  // Also after an error: a range must be empty when it is given back.
  const absl::Status unmapped =
      each(figures.unmap, [&](uint64_t, Address address) { return device.Unmap(address, bytes); });
  (void)each(figures.release, [&](uint64_t i, Address) {
    if (i < cells.size()) cells[i].reset();
    return absl::OkStatus();
  });
  if (status.ok()) status = unmapped;
  if (!status.ok()) return status;
  return figures;
}

absl::StatusOr<CellFigures> MeasureCells(const Device& device, uint64_t bytes, uint64_t count) {
  std::vector<CellFigures> rounds;
  for (int i = 0; i <= kRounds; ++i) {
    auto round = OneRound(device, bytes, count);
    if (!round.ok()) return round.status();
    // The first one warms up.
    if (i > 0) rounds.push_back(*std::move(round));
  }
  const auto median = [&](absl::Duration CellFigures::*figure) {
    std::vector<absl::Duration> durations;
    for (const CellFigures& round : rounds) durations.push_back(round.*figure);
    return Median(durations);
  };
  CellFigures figures{.bytes = bytes};
  for (absl::Duration CellFigures::*figure :
       {&CellFigures::create, &CellFigures::map, &CellFigures::set_access, &CellFigures::export_descriptor,
        &CellFigures::unmap, &CellFigures::release}) {
    figures.*figure = median(figure);
  }
  std::vector<absl::Duration> imports;
  for (const CellFigures& round : rounds) {
    if (round.import_descriptor.has_value()) imports.push_back(*round.import_descriptor);
  }
  if (imports.size() == rounds.size()) figures.import_descriptor = Median(imports);
  return figures;
}

std::string DriverText(const DeviceInfo& info) {
  const std::string module = FirstLine("/sys/module/nvidia/version");
  return absl::StrFormat("%s%sCUDA %d.%d", module, module.empty() ? "" : ", ", info.driver_version / 1000,
                         info.driver_version % 1000 / 10);
}

std::string PcieText(const Device& device) {
  CUdevice handle = 0;
  int domain = 0;
  int bus = 0;
  int slot = 0;
  const Driver& driver = device.driver();
  if (driver.cuDeviceGet(&handle, device.info().ordinal) != CUDA_SUCCESS ||
      driver.cuDeviceGetAttribute(&domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, handle) != CUDA_SUCCESS ||
      driver.cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, handle) != CUDA_SUCCESS ||
      driver.cuDeviceGetAttribute(&slot, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, handle) != CUDA_SUCCESS) {
    return "unknown";
  }
  const std::string folder = absl::StrFormat("/sys/bus/pci/devices/%04x:%02x:%02x.0/", domain, bus, slot);
  // A simulated card has no place on the bus; 0:0:0 is the host's bridge.
  const std::string now = FirstLine(folder + "current_link_speed");
  if (now.empty() || (bus == 0 && slot == 0)) return "unknown";
  return absl::StrCat(now, " x", FirstLine(folder + "current_link_width"), " of ", FirstLine(folder + "max_link_speed"),
                      " x", FirstLine(folder + "max_link_width"));
}

}  // namespace

absl::StatusOr<CardFigures> MeasureCard(const Device& device, uint64_t most_bytes,
                                        const std::function<void(const std::string&)>& stage) {
  // Says which step of a cell's life fails, where one does.
  if (absl::Status usable = device.Probe(); !usable.ok()) return usable;
  const auto bytes = ChooseBytes(device, most_bytes);
  if (!bytes.ok()) return bytes.status();
  CardFigures figures{.device = device.info(), .driver = DriverText(device.info()), .measured_bytes = *bytes};
  utsname system{};
  if (uname(&system) == 0) figures.kernel = absl::StrCat(system.sysname, " ", system.release);
  if (absl::Status status = MeasureBytes(device, stage, figures); !status.ok()) return status;
  figures.pcie = PcieText(device);
  for (const uint64_t cell_bytes : kCellSizes) {
    if (cell_bytes > *bytes) continue;
    stage(absl::StrCat("measuring cells of ", FormatBytes(cell_bytes)));
    auto cells = MeasureCells(device, cell_bytes, std::min(kMostCells, *bytes / cell_bytes));
    if (!cells.ok()) return cells.status();
    figures.cells.push_back(*std::move(cells));
  }
  return figures;
}

}  // namespace residency
