// SPDX-License-Identifier: Apache-2.0
//
// What the figures of the benchmark are held against: the same card, through the same table of driver calls, with
// nothing of residencyd in between. gpu_bench starts it and keeps it running, so that a plain copy is measured beside
// each activation. It answers one line to each line that it reads:
//   copy BYTES   seconds that BYTES took from page-locked memory to the device, in pieces of 64 MiB one after the other
//   free         the driver's free and total bytes of the card
//   read FILE    bytes and seconds of reading FILE past the page cache, with all of it in flight that four threads have
// or `error: MESSAGE`. With --busy it is instead a client that keeps the card busy: it says `busy` once a kernel that
// reads device memory runs, keeps one running until its standard input closes, and says what it read, in bytes a
// second.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/device.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/units.h"
#include "tests/bench/busy_kernel.h"

namespace residency {
namespace {

// The link's rate is reached from 16 MiB up (54.6 GB/s), 64 MiB and 1 GiB are alike (55.0 to 55.4).
constexpr uint64_t kPieceBytes = 64 * kMiB;
constexpr uint64_t kReadBlockBytes = 4 * kMiB;
constexpr int kReadThreads = 4;
constexpr uint64_t kDirectAlignment = 4096;

struct Flags {
  std::string driver = "cuda";
  int device = 0;
  SimOptions sim;
  uint64_t buffer_bytes = kGiB;
  bool busy = false;
};

class Stopwatch {
 public:
  double Seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Anonymous memory, in huge pages where the system has them, full of words that differ.
class HostBuffer {
 public:
  static absl::StatusOr<HostBuffer> Make(uint64_t bytes) {
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes, " bytes"));
    (void)madvise(address, bytes, MADV_HUGEPAGE);
    uint64_t word = 0x9e3779b97f4a7c15;
    for (uint64_t i = 0; i < bytes / sizeof(word); ++i) {
      word ^= word << 13;
      word ^= word >> 7;
      word ^= word << 17;
      static_cast<uint64_t*>(address)[i] = word;
    }
    return HostBuffer(address, bytes);
  }
  HostBuffer(HostBuffer&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostBuffer& operator=(HostBuffer&&) = delete;
  ~HostBuffer() {
    if (address_ != nullptr) munmap(address_, bytes_);
  }
  char* get() const { return static_cast<char*>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  HostBuffer(void* address, uint64_t bytes) : address_(address), bytes_(bytes) {}

  void* address_;
  uint64_t bytes_;
};

// A page-locked buffer, as large a one on the device, and the copies between them. A copy of more bytes than they have
// goes round: 1 GiB is beyond every cache on the way, and 64 GiB beside a mirror of 64 GiB would not fit the host.
class PlainCopy {
 public:
  static absl::StatusOr<std::unique_ptr<PlainCopy>> Make(const Device& device, uint64_t bytes) {
    auto host = HostBuffer::Make(bytes);
    if (!host.ok()) return host.status();
    auto registration = device.RegisterHost(host->get(), bytes);
    if (!registration.ok()) return registration.status();
    auto target = device.Allocate(bytes);
    if (!target.ok()) return target.status();
    auto stream = device.CreateStream();
    if (!stream.ok()) return stream.status();
    return std::unique_ptr<PlainCopy>(
        new PlainCopy(device, *std::move(host), *std::move(registration), *std::move(target), *std::move(stream)));
  }

  absl::StatusOr<double> Seconds(uint64_t bytes) {
    const Stopwatch watch;
    for (uint64_t done = 0; done < bytes;) {
      const uint64_t offset = done % host_.bytes();
      const uint64_t piece = std::min({kPieceBytes, bytes - done, host_.bytes() - offset});
      const auto status = device_.CopyToDevice(target_.get() + offset, host_.get() + offset, piece, stream_);
      if (!status.ok()) return status;
      done += piece;
    }
    if (auto status = device_.Synchronize(stream_); !status.ok()) return status;
    return watch.Seconds();
  }

 private:
  PlainCopy(const Device& device, HostBuffer host, HostRegistration registration, DeviceBuffer target, Stream stream)
      : device_(device),
        host_(std::move(host)),
        registration_(std::move(registration)),
        target_(std::move(target)),
        stream_(std::move(stream)) {}

  const Device& device_;
  HostBuffer host_;
  HostRegistration registration_;
  DeviceBuffer target_;
  Stream stream_;
};

// Reads the blocks that are its turn until there are none.
absl::Status ReadBlocks(int fd, uint64_t file_bytes, std::atomic<uint64_t>& next, std::atomic<uint64_t>& read_bytes) {
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kDirectAlignment, kReadBlockBytes),
                                                          std::free);
  for (;;) {
    const uint64_t offset = next.fetch_add(kReadBlockBytes);
    if (offset >= file_bytes) return absl::OkStatus();
    const ssize_t got = pread(fd, block.get(), kReadBlockBytes, static_cast<off_t>(offset));
    if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("reading at ", offset));
    read_bytes += static_cast<uint64_t>(got);
  }
}

absl::StatusOr<std::string> ReadPastCache(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("open with O_DIRECT of ", path));
  const off_t end = lseek(file.get(), 0, SEEK_END);
  if (end < 0) return absl::ErrnoToStatus(errno, path);
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> read_bytes{0};
  std::vector<absl::Status> statuses(kReadThreads);
  const Stopwatch watch;
  std::vector<std::thread> threads;
  for (absl::Status& status : statuses) {
    threads.emplace_back([&, out = &status] { *out = ReadBlocks(file.get(), end, next, read_bytes); });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = watch.Seconds();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  if (read_bytes != static_cast<uint64_t>(end)) {
    return absl::DataLossError(absl::StrCat(path, ": ", read_bytes.load(), " of ", end, " bytes were read"));
  }
  return absl::StrFormat("%d %.9f", end, seconds);
}

absl::StatusOr<std::string> Obey(const std::string& line, const Device& device, uint64_t buffer_bytes,
                                 std::unique_ptr<PlainCopy>& copy) {
  const size_t space = line.find(' ');
  const std::string command = line.substr(0, space);
  const std::string argument = space == std::string::npos ? "" : line.substr(space + 1);
  if (command == "copy") {
    uint64_t bytes = 0;
    if (!absl::SimpleAtoi(argument, &bytes)) return absl::InvalidArgumentError(line);
    // Made when first asked for: not every arm copies, and page-locking takes its time.
    if (copy == nullptr) {
      auto made = PlainCopy::Make(device, buffer_bytes);
      if (!made.ok()) return made.status();
      copy = *std::move(made);
    }
    auto seconds = copy->Seconds(bytes);
    if (!seconds.ok()) return seconds.status();
    return absl::StrFormat("%.9f", *seconds);
  }
  if (command == "free") {
    auto memory = device.Memory();
    if (!memory.ok()) return memory.status();
    return absl::StrCat(memory->free_bytes, " ", memory->total_bytes);
  }
  if (command == "read") return ReadPastCache(argument);
  return absl::InvalidArgumentError(absl::StrCat("no such command: ", line));
}

int Fail(const absl::Status& status) {
  std::cout << "error: " << std::string(status.message()) << std::endl;
  return 1;
}

int Serve(const Flags& flags, const Device& device) {
  std::unique_ptr<PlainCopy> copy;
  for (std::string line; std::getline(std::cin, line);) {
    const auto answer = Obey(line, device, flags.buffer_bytes, copy);
    if (answer.ok()) {
      std::cout << *answer << std::endl;
    } else {
      Fail(answer.status());
    }
  }
  return 0;
}

int KeepBusy(const Flags& flags, const Device& device) {
  auto busy = BusyKernel::Make(device, flags.buffer_bytes);
  if (!busy.ok()) return Fail(busy.status());
  std::atomic<bool> ended{false};
  std::thread waiter([&ended] {
    while (std::cin.get() != std::char_traits<char>::eof()) {
    }
    ended = true;
  });
  absl::Status status;
  const Stopwatch watch;
  while (status.ok() && !ended) {
    status = (*busy)->Launch();
    if ((*busy)->launches() == 2) std::cout << "busy" << std::endl;
  }
  const double seconds = watch.Seconds();
  if (!status.ok()) {
    Fail(status);
    std::_Exit(1);  // the waiter still reads
  }
  waiter.join();
  std::cout << absl::StrFormat("%.0f", static_cast<double>((*busy)->launches() * (*busy)->bytes_each()) / seconds)
            << std::endl;
  return 0;
}

int Main(const Flags& flags) {
  const auto kind = ParseDriverKind(flags.driver);
  if (!kind.ok()) return Fail(kind.status());
  const auto driver = OpenDriver(*kind, flags.sim);
  if (!driver.ok()) return Fail(driver.status());
  if (auto count = Device::Count(*driver); !count.ok()) return Fail(count.status());
  const auto device = Device::Open(*driver, flags.device);
  if (!device.ok()) return Fail(device.status());
  return flags.busy ? KeepBusy(flags, **device) : Serve(flags, **device);
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  residency::Flags flags;
  CLI::App app("Plain copies beside the benchmark's figures; gpu_bench starts it.", "plain_copy");
  app.add_option("--driver", flags.driver, "cuda or sim");
  app.add_option("--device", flags.device, "which GPU, in the driver's order");
  app.add_option("--sim_dir", flags.sim.directory, "where the simulated cards are");
  app.add_option("--sim_link_bytes_per_second", flags.sim.link_bytes_per_second,
                 "speed of their links; 0: unthrottled");
  app.add_option("--buffer_bytes", flags.buffer_bytes, "of the page-locked buffer, and of the one on the device");
  app.add_flag("--busy", flags.busy, "keep the card busy instead");
  CLI11_PARSE(app, argc, argv);
  return residency::Main(flags);
}
