// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill.h"

#include <fcntl.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mechanisms/refill_plan.h"
#include "mechanisms/refusal.h"
#include "tests/source_files.h"

namespace residency {
namespace {

// A range of a file that a test wants.
struct Wish {
  uint32_t file = 0;
  uint64_t file_offset = 0;
  uint64_t bytes = 0;
};

// Destinations for wishes, each with guard bytes around it.
class Destinations {
 public:
  explicit Destinations(const std::vector<Wish>& wishes) {
    for (const Wish& wish : wishes) memory_.emplace_back(wish.bytes + 2 * kGuardBytes, kGuard);
    for (size_t i = 0; i < wishes.size(); ++i) {
      pieces_.push_back({wishes[i].file, wishes[i].file_offset, wishes[i].bytes, memory_[i].data() + kGuardBytes});
    }
  }

  const std::vector<ReadPiece>& pieces() const { return pieces_; }

  // File i of the wishes holds the content of seed i.
  void CheckAll() const {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      Bytes expected(kGuardBytes, kGuard);
      const Bytes content = Content(pieces_[i].file, pieces_[i].file_offset, pieces_[i].bytes);
      expected.insert(expected.end(), content.begin(), content.end());
      expected.insert(expected.end(), kGuardBytes, kGuard);
      INFO("piece " << i << " at " << pieces_[i].file_offset << ", " << pieces_[i].bytes << " bytes");
      CHECK((memory_[i] == expected));
    }
  }

 private:
  static constexpr size_t kGuardBytes = 16;
  static constexpr std::byte kGuard{0xa5};
  std::vector<Bytes> memory_;
  std::vector<ReadPiece> pieces_;
};

uint64_t TotalBytes(const std::vector<ReadPiece>& pieces) {
  uint64_t sum = 0;
  for (const ReadPiece& piece : pieces) sum += piece.bytes;
  return sum;
}

constexpr uint64_t kFileBytes = kMiB + 123;

// One file of kFileBytes.
struct OneFile {
  TempDir dir;
  std::vector<SourceFile> files{WriteContent(dir.Path("weights"), 0, kFileBytes)};
};

const std::vector<Wish> kOddWishes = {
    {0, 17, 1},     {0, 18, 4095},     {0, 4113, 0},        {0, 5000, 70001},
    {0, 200003, 8}, {0, 500000, 4096}, {0, 504096, 300000}, {0, kFileBytes - 5001, 5001},
};

TEST_CASE("every engine, block size and depth brings the same bytes, past the page cache and through it") {
  const OneFile one;
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    for (bool direct : {true, false}) {
      for (uint64_t block_bytes : {uint64_t{4096}, 64 * kKiB, 4 * kMiB}) {
        for (uint32_t depth : {1u, 3u, 8u}) {
          INFO("engine " << static_cast<int>(engine) << ", direct " << direct << ", blocks of " << block_bytes
                         << ", depth " << depth);
          Destinations to(kOddWishes);
          const auto report = Refill(
              one.files, to.pieces(),
              {.engine = engine, .direct = direct, .block_bytes = block_bytes, .queue_depth = depth, .workers = 2}, {});
          REQUIRE(report.ok());
          to.CheckAll();
          CHECK(report->direct_files + report->buffered_files == 1);
          if (!direct) CHECK(report->direct_files == 0);
          if (engine == ReadEngine::kThreads) CHECK(report->engine == ReadEngine::kThreads);
        }
      }
    }
  }
}

TEST_CASE("io_uring is used where the system has it, and threads where it refuses") {
  const OneFile one;
  const auto reader = MakeUringReader(1);
  Destinations to(kOddWishes);
  const auto automatic = Refill(one.files, to.pieces(), {}, {});
  const auto forced = Refill(one.files, to.pieces(), {.engine = ReadEngine::kUring}, {});
  REQUIRE(automatic.ok());
  if (reader.ok()) {
    CHECK(automatic->engine == ReadEngine::kUring);
    REQUIRE(forced.ok());
    CHECK(forced->engine == ReadEngine::kUring);
  } else {
    CHECK(ReasonOf(reader.status()) == "NO_URING");
    CHECK(automatic->engine == ReadEngine::kThreads);
    CHECK(absl::IsUnavailable(forced.status()));
    CHECK(ReasonOf(forced.status()) == "NO_URING");
  }
  to.CheckAll();
}

TEST_CASE("pieces of many files are read, and files without a wanted byte are not opened") {
  const TempDir dir;
  std::vector<SourceFile> files;
  std::vector<Wish> wishes;
  for (uint32_t i = 0; i < 40; ++i) {
    files.push_back(WriteContent(dir.Path("shard" + std::to_string(i)), i, 10000 + 777 * i));
    if (i % 10 == 3) {
      std::filesystem::remove(files[i].path);  // would be noticed
      wishes.push_back({i, 100, 0});
    } else if (i % 10 != 4) {
      wishes.push_back({i, i, 9000 + 777 * i});
    }
  }
  Destinations to(wishes);
  const auto report = Refill(files, to.pieces(), {.block_bytes = 4096}, {});
  REQUIRE(report.ok());
  to.CheckAll();
  CHECK(report->direct_files + report->buffered_files == 32);
}

TEST_CASE("pieces that share bytes of the file each get them") {
  const OneFile one;
  Destinations to({{0, 0, 300000}, {0, 0, 1}, {0, 10, 299990}, {0, 4096, 4096}, {0, 5000, 9}, {0, 299999, 50000}});
  REQUIRE(Refill(one.files, to.pieces(), {.block_bytes = 8192}, {}).ok());
  to.CheckAll();
}

TEST_CASE("no pieces are nothing to do") {
  const OneFile one;
  const auto report = Refill(one.files, {}, {}, {});
  REQUIRE(report.ok());
  CHECK(report->read_bytes == 0);
}

TEST_CASE("a symbolic link is followed") {
  const OneFile one;
  std::filesystem::create_symlink("weights", one.dir.Path("link"));
  std::vector<SourceFile> files = one.files;
  files[0].path = one.dir.Path("link");
  Destinations to(kOddWishes);
  CHECK(Refill(files, to.pieces(), {}, {}).ok());
  to.CheckAll();
}

TEST_CASE("only pages with wanted bytes are read") {
  const OneFile one;
  Destinations to({{0, 100, 8}, {0, 700000, 5000}});
  const auto report = Refill(one.files, to.pieces(), {}, {});
  REQUIRE(report.ok());
  // Byte 100 lies on page 0; bytes 700000 to 704999 on the pages 170 to 172.
  CHECK(report->read_bytes == 4 * 4096);
}

TEST_CASE("copied tells every byte once, after it has come, and prepare before") {
  const OneFile one;
  Destinations to(kOddWishes);
  std::mutex mutex;
  std::map<const std::byte*, uint64_t> prepared;
  std::map<const std::byte*, uint64_t> copied;
  bool in_order = true;
  bool right = true;
  RefillCallbacks callbacks;
  callbacks.prepare = [&](std::byte* destination, uint64_t bytes) {
    std::lock_guard lock(mutex);
    prepared[destination] = bytes;
    return absl::OkStatus();
  };
  callbacks.copied = [&](std::byte* destination, uint64_t bytes) {
    std::lock_guard lock(mutex);
    in_order &= prepared.count(destination) == 1 && prepared[destination] == bytes;
    in_order &= copied.emplace(destination, bytes).second;
    for (const ReadPiece& piece : to.pieces()) {
      if (destination < piece.destination || destination >= piece.destination + piece.bytes) continue;
      const Bytes expected = Content(0, piece.file_offset + (destination - piece.destination), bytes);
      right &= std::equal(expected.begin(), expected.end(), destination);
    }
  };
  REQUIRE(Refill(one.files, to.pieces(), {.block_bytes = 4096}, callbacks).ok());
  CHECK(in_order);
  CHECK(right);
  for (const ReadPiece& piece : to.pieces()) {
    uint64_t covered = 0;
    while (covered < piece.bytes && copied.count(piece.destination + covered) == 1) {
      covered += copied[piece.destination + covered];
    }
    CHECK(covered == piece.bytes);
  }
  uint64_t told = 0;
  for (const auto& [destination, bytes] : copied) told += bytes;
  CHECK(told == TotalBytes(to.pieces()));
}

TEST_CASE("progress rises to the bytes of all pieces") {
  const OneFile one;
  Destinations to(kOddWishes);
  std::vector<uint64_t> seen;
  RefillCallbacks callbacks;
  callbacks.progress = [&](uint64_t done_bytes) {
    seen.push_back(done_bytes);
    return true;
  };
  REQUIRE(Refill(one.files, to.pieces(), {.block_bytes = 4096}, callbacks).ok());
  REQUIRE(!seen.empty());
  CHECK(std::is_sorted(seen.begin(), seen.end()));
  CHECK(seen.back() == TotalBytes(to.pieces()));
}

TEST_CASE("a refill that is cancelled ends soon and leaves no descriptor") {
  const OneFile one;
  const size_t descriptors = OpenDescriptors();
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    Destinations to({{0, 0, kFileBytes}});
    int calls = 0;
    RefillCallbacks callbacks;
    callbacks.progress = [&](uint64_t) { return ++calls < 3; };
    const auto report = Refill(one.files, to.pieces(), {.engine = engine, .block_bytes = 4096}, callbacks);
    CHECK(absl::IsCancelled(report.status()));
    CHECK(ReasonOf(report.status()) == "CANCELLED");
    CHECK(calls == 3);
  }
  CHECK(OpenDescriptors() == descriptors);
}

TEST_CASE("an error of prepare is the answer") {
  const OneFile one;
  Destinations to({{0, 0, kFileBytes}});
  RefillCallbacks callbacks;
  callbacks.prepare = [](std::byte*, uint64_t) { return absl::ResourceExhaustedError("no room"); };
  CHECK(Refill(one.files, to.pieces(), {}, callbacks).status() == absl::ResourceExhaustedError("no room"));
}

void CheckRefused(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                  const std::string& file) {
  INFO(status.ToString());
  CHECK(status.code() == code);
  const auto refusal = GetRefusal(status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == reason);
  CHECK(refusal->file == file);
  CHECK(std::string(status.message()).find(file) != std::string::npos);
}

TEST_CASE("a file that is gone, replaced, resized or touched since the manifest is refused before a byte comes") {
  const OneFile one;
  const std::string path = one.files[0].path;
  Destinations to({{0, 0, 1000}});
  const auto read = [&] {
    RefillCallbacks callbacks;
    callbacks.copied = [](std::byte*, uint64_t) { FAIL_CHECK("bytes of a changed file came"); };
    return Refill(one.files, to.pieces(), {}, callbacks).status();
  };
  SECTION("gone") {
    std::filesystem::remove(path);
    CheckRefused(read(), absl::StatusCode::kNotFound, "FILE_MISSING", path);
  }
  SECTION("replaced by an equal file") {
    WriteContent(one.dir.Path("other"), 0, kFileBytes);
    std::filesystem::rename(one.dir.Path("other"), path);
    CheckRefused(read(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", path);
  }
  SECTION("grown") {
    std::ofstream(path, std::ios::app) << "x";
    CheckRefused(read(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", path);
  }
  SECTION("cut") {
    std::filesystem::resize_file(path, kFileBytes - 1);
    CheckRefused(read(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", path);
  }
  SECTION("touched") {
    const timespec times[2] = {{0, UTIME_OMIT}, {1'000'000, 1}};
    REQUIRE(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
    CheckRefused(read(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", path);
  }
  SECTION("a pipe without a writer") {
    std::filesystem::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    CheckRefused(read(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", path);
  }
  SECTION("no longer readable for us") {
    REQUIRE(::chmod(path.c_str(), 0) == 0);
    absl::Status status;
    // Who may read everything is somebody else for the file system, on this thread and those that it starts.
    std::thread([&] {
      ::setfsuid(65534);
      status = read();
    }).join();
    CheckRefused(status, absl::StatusCode::kPermissionDenied, "UNREADABLE", path);
  }
}

TEST_CASE("a file that is written to while it is read is noticed at its end") {
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    const OneFile one;
    Destinations to({{0, 0, kFileBytes}});
    bool done = false;
    RefillCallbacks callbacks;
    callbacks.progress = [&](uint64_t) {
      if (!std::exchange(done, true)) std::ofstream(one.files[0].path, std::ios::app) << "x";
      return true;
    };
    const auto report = Refill(one.files, to.pieces(), {.engine = engine, .block_bytes = 4096}, callbacks);
    CheckRefused(report.status(), absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", one.files[0].path);
  }
}

TEST_CASE("a file that is cut while it is read ends in an error, never in a signal") {
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    for (bool direct : {true, false}) {
      const OneFile one;
      const size_t descriptors = OpenDescriptors();
      Destinations to({{0, 0, kFileBytes}});
      bool done = false;
      RefillCallbacks callbacks;
      callbacks.progress = [&](uint64_t) {
        if (!std::exchange(done, true)) std::filesystem::resize_file(one.files[0].path, 5000);
        return true;
      };
      const auto report =
          Refill(one.files, to.pieces(), {.engine = engine, .direct = direct, .block_bytes = 4096}, callbacks);
      CheckRefused(report.status(), absl::StatusCode::kDataLoss, "FILE_TRUNCATED", one.files[0].path);
      CHECK(OpenDescriptors() == descriptors);
    }
  }
}

// Reads by pread, and lets `change` say what becomes of each result.
class ChangedReader : public BlockReader {
 public:
  using Change = std::function<int64_t(const BlockRead& read, int64_t result)>;
  explicit ChangedReader(Change change) : change_(std::move(change)) { reader_ = *MakePreadReader(1); }

  void Start(uint32_t slot, const BlockRead& read) override {
    reads_[slot] = read;
    reader_->Start(slot, read);
  }
  BlockResult Wait() override {
    BlockResult done = reader_->Wait();
    done.result = change_(reads_[done.slot], done.result);
    return done;
  }

 private:
  Change change_;
  std::unique_ptr<BlockReader> reader_;
  std::map<uint32_t, BlockRead> reads_;
};

absl::StatusOr<RefillReport> RefillChanged(const OneFile& one, const Destinations& to, ChangedReader::Change change,
                                           bool direct = true) {
  return RefillThrough(one.files, to.pieces(), {.direct = direct, .block_bytes = 16384}, {},
                       [&](uint32_t) { return std::make_unique<ChangedReader>(change); });
}

bool IsDirect(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

TEST_CASE("a disk's read error is DATA_LOSS and names the file and the byte") {
  const OneFile one;
  Destinations to({{0, 0, kFileBytes}});
  const auto report = RefillChanged(
      one, to, [](const BlockRead& read, int64_t result) { return read.file_offset == 32768 ? -EIO : result; });
  CheckRefused(report.status(), absl::StatusCode::kDataLoss, "READ_ERROR", one.files[0].path);
  CHECK(std::string(report.status().message()).find("32768") != std::string::npos);
}

TEST_CASE("a file whose direct reads are refused is read through the page cache") {
  const OneFile one;
  Destinations to(kOddWishes);
  const auto report = RefillChanged(
      one, to, [](const BlockRead& read, int64_t result) { return IsDirect(read.fd) ? -EINVAL : result; });
  REQUIRE(report.ok());
  CHECK(report->buffered_files == 1);
  CHECK(report->direct_files == 0);
  to.CheckAll();
}

TEST_CASE("a file system that can neither read directly nor be mapped is read all the same, by either engine") {
  // The kernel's own file systems are of that kind, and every machine has one.
  const std::string path = "/sys/kernel/notes";
  const int open_file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);  // keeps the inode, and its times, as they are
  REQUIRE(open_file >= 0);
  REQUIRE(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) == -1);
  std::ifstream file(path, std::ios::binary);
  std::string expected{std::istreambuf_iterator<char>(file), {}};
  REQUIRE(expected.size() > 16);
  const std::vector<SourceFile> files{Describe(path)};
  for (const ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    std::string content(expected.size() - 5, '?');
    const ReadPiece piece{0, 5, content.size(), reinterpret_cast<std::byte*>(content.data())};
    const auto report = Refill(files, std::span(&piece, 1), {.engine = engine}, {});
    INFO(report.status());
    REQUIRE(report.ok());
    CHECK(report->buffered_files == 1);
    CHECK(content == expected.substr(5));
  }
  ::close(open_file);
}

TEST_CASE("a read that is refused through the page cache too is an error") {
  const OneFile one;
  for (bool direct : {true, false}) {
    Destinations to(kOddWishes);
    const auto report = RefillChanged(
        one, to, [](const BlockRead&, int64_t) { return -EINVAL; }, direct);
    CheckRefused(report.status(), absl::StatusCode::kDataLoss, "READ_ERROR", one.files[0].path);
  }
}

TEST_CASE("reads that bring less than was asked for are continued") {
  const OneFile one;
  for (int64_t most : {int64_t{4096}, int64_t{5000}, int64_t{16383}}) {
    Destinations to(kOddWishes);
    const auto report =
        RefillChanged(one, to, [most](const BlockRead&, int64_t result) { return std::min(result, most); });
    REQUIRE(report.ok());
    to.CheckAll();
  }
}

TEST_CASE("an interrupted read is tried again, but not for ever") {
  const OneFile one;
  Destinations to(kOddWishes);
  std::atomic<int> calls = 0;
  CHECK(RefillChanged(one, to, [&](const BlockRead&, int64_t result) {
          return ++calls % 2 == 1 ? -EINTR : result;
        }).ok());
  to.CheckAll();
  const auto report = RefillChanged(one, to, [](const BlockRead&, int64_t) { return -EAGAIN; });
  CheckRefused(report.status(), absl::StatusCode::kDataLoss, "READ_ERROR", one.files[0].path);
}

TEST_CASE("a kernel short of memory is RESOURCE_EXHAUSTED") {
  const OneFile one;
  Destinations to(kOddWishes);
  const auto report = RefillChanged(one, to, [](const BlockRead&, int64_t) { return -ENOMEM; });
  CHECK(absl::IsResourceExhausted(report.status()));
}

TEST_CASE("of several failures the first block's is told") {
  const OneFile one;
  for (int round = 0; round < 20; ++round) {
    Destinations to({{0, 0, kFileBytes}});
    // Both are among the reads that are under way from the start, so both happen.
    const auto report =
        RefillThrough(one.files, to.pieces(), {.block_bytes = 16384, .queue_depth = 2, .workers = 1}, {}, [](uint32_t) {
          return std::make_unique<ChangedReader>(
              [](const BlockRead& read, int64_t) { return read.file_offset == 0 ? -EIO : -ENODATA; });
        });
    CHECK(std::string(report.status().message()).find("at byte 0:") != std::string::npos);
  }
}

TEST_CASE("pieces and options that make no sense are refused") {
  const OneFile one;
  Destinations to({{0, 0, 100}, {0, 50, 100}});
  const auto refused = [&](std::vector<ReadPiece> pieces, RefillOptions options) {
    const absl::Status status = Refill(one.files, pieces, options, {}).status();
    return absl::IsInvalidArgument(status) && ReasonOf(status) == "BAD_PIECES";
  };
  std::vector<ReadPiece> pieces = to.pieces();
  CHECK(refused(pieces, {.block_bytes = 0}));
  CHECK(refused(pieces, {.block_bytes = 5000}));
  CHECK(refused(pieces, {.queue_depth = 0}));
  CHECK(refused(pieces, {.workers = 0}));
  CHECK(refused({pieces[1], pieces[0]}, {}));
  pieces[1].file = 1;
  CHECK(refused(pieces, {}));
  pieces[1] = {0, kFileBytes - 99, 100, pieces[1].destination};
  CHECK(refused(pieces, {}));
  pieces[1].file_offset = ~uint64_t{0} - 10;
  CHECK(refused(pieces, {}));
}

TEST_CASE("blocks hold every wanted byte, no page twice and no page in vain") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    std::vector<ReadPiece> pieces;
    for (uint32_t file = 0; file < 3; ++file) {
      uint64_t offset = random() % 10000;
      for (uint64_t count = random() % 12; count > 0; --count) {
        const uint64_t bytes = random() % 4 == 0 ? 0 : random() % (random() % 2 == 0 ? 100 : 30000);
        pieces.push_back({file, offset, bytes, nullptr});
        offset += random() % 3 == 0 ? random() % 50000 : bytes;
      }
    }
    std::set<std::pair<uint32_t, uint64_t>> wanted;
    for (const ReadPiece& piece : pieces) {
      if (piece.bytes == 0) continue;
      const uint64_t last_page = (piece.file_offset + piece.bytes - 1) / kReadAlignment;
      for (uint64_t page = piece.file_offset / kReadAlignment; page <= last_page; ++page) {
        wanted.emplace(piece.file, page);
      }
    }
    const uint64_t block_bytes = kReadAlignment * (1 + random() % 5);
    std::set<std::pair<uint32_t, uint64_t>> read;
    std::pair<uint32_t, uint64_t> last_end = {0, 0};
    std::vector<uint64_t> covered(pieces.size(), 0);
    for (const ReadBlock& block : PlanBlocks(pieces, block_bytes)) {
      CHECK(std::pair(block.file, block.file_offset) >= last_end);
      last_end = {block.file, block.file_offset + block.bytes};
      CHECK(block.file_offset % kReadAlignment == 0);
      CHECK(block.bytes % kReadAlignment == 0);
      CHECK(block.bytes <= block_bytes);
      CHECK(block.needed_bytes > block.bytes - kReadAlignment);
      CHECK(block.needed_bytes <= block.bytes);
      for (uint64_t page = 0; page < block.bytes / kReadAlignment; ++page) {
        CHECK(read.emplace(block.file, block.file_offset / kReadAlignment + page).second);
      }
      for (uint32_t i = block.first_piece; i < block.end_piece; ++i) {
        const uint64_t begin = std::max(block.file_offset, pieces[i].file_offset);
        const uint64_t end = std::min(block.file_offset + block.needed_bytes, pieces[i].file_offset + pieces[i].bytes);
        if (begin < end) covered[i] += end - begin;
      }
    }
    CHECK((read == wanted));
    for (size_t i = 0; i < pieces.size(); ++i) CHECK(covered[i] == pieces[i].bytes);
  }
}

}  // namespace
}  // namespace residency
