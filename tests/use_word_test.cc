// SPDX-License-Identifier: Apache-2.0
//
// The use word in real memory: real threads, two processes, the kernel's futex and eventfd. That the protocol is right
// in every interleaving is the matter of use_word_model_test.cc.
#include "mechanisms/use_word.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace residency {
namespace {

// Counts the allocations of a thread; the operators below add to it. They are not inlined, or the compiler would take
// free for a mistake.
thread_local int allocations = 0;

}  // namespace
}  // namespace residency

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++residency::allocations;
  if (void* memory = malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++residency::allocations;
  return malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { free(memory); }

namespace residency {
namespace {

constexpr UseWordState kOpenAndIdle{false, false, 0};
constexpr UseWordState kClosedAndTaken{true, true, 0};

// One lease: the daemon's and the client's view of one page, mapped twice as in two processes.
struct Lease {
  Lease()
      : fd(MakeUseWordPage().value()),
        daemon_mapping(UseWordMapping::Map(fd.get()).value()),
        client_mapping(UseWordMapping::Map(fd.get()).value()),
        reader_event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        daemon(daemon_mapping.word()),
        client(client_mapping.word(reader_event.get())) {}

  // Waits for the reader's eventfd and drains it.
  bool ReaderIsWoken(int timeout_ms) {
    pollfd entry{reader_event.get(), POLLIN, 0};
    uint64_t count = 0;
    return poll(&entry, 1, timeout_ms) == 1 && read(reader_event.get(), &count, sizeof(count)) == sizeof(count);
  }

  UniqueFd fd;
  UseWordMapping daemon_mapping, client_mapping;
  UniqueFd reader_event;
  UseWord daemon, client;
};

absl::Time Soon() { return absl::Now() + absl::Milliseconds(20); }
absl::Time Late() { return absl::Now() + absl::Seconds(30); }

// Runs `body` in a child and answers its wait status.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

TEST_CASE("A new word is closed, taken and empty, in a file that cannot be resized") {
  Lease lease;
  CHECK(lease.daemon.Read() == kClosedAndTaken);
  CHECK(lease.client.Read() == kClosedAndTaken);
  CHECK(ftruncate(lease.fd.get(), 0) == -1);
  CHECK(ftruncate(lease.fd.get(), 2 * kUseWordPageBytes) == -1);
  CHECK(fcntl(lease.fd.get(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
  CHECK((fcntl(lease.fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("A file without the seals, of another size, or no file at all is not taken for a use word") {
  const UniqueFd open_file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(open_file.get(), kUseWordPageBytes) == 0);
  CHECK(UseWordMapping::Map(open_file.get()).status().code() == absl::StatusCode::kInvalidArgument);
  REQUIRE(ftruncate(open_file.get(), 1) == 0);
  REQUIRE(fcntl(open_file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK(UseWordMapping::Map(open_file.get()).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_FALSE(UseWordMapping::Map(-1).ok());
}

TEST_CASE("The mapping outlives the descriptor, and moves") {
  UniqueFd fd = MakeUseWordPage().value();
  UseWordMapping first = UseWordMapping::Map(fd.get()).value();
  fd.reset();
  UseWordMapping second = std::move(first);
  second = std::move(second);
  second.word().Open();
  CHECK(second.word().Read() == kOpenAndIdle);
}

TEST_CASE("A life of a lease: open, used, closed, taken, open again") {
  Lease lease;
  lease.client.Open();
  CHECK(lease.client.Enter(Late()) == EnterResult::kEntered);
  lease.client.EnterNested();
  CHECK(lease.daemon.Read() == UseWordState{false, false, 2});
  CHECK(lease.daemon.CloseIfIdle() == CloseResult::kInUse);
  CHECK(lease.daemon.Close() == CloseResult::kClosed);
  CHECK(lease.daemon.Close() == CloseResult::kAlreadyClosed);
  CHECK(lease.daemon.CloseIfIdle() == CloseResult::kAlreadyClosed);
  CHECK(lease.client.TryTake() == TakeResult::kInUse);
  lease.client.Leave();
  CHECK_FALSE(lease.ReaderIsWoken(0));
  lease.client.Leave();
  CHECK(lease.ReaderIsWoken(0));
  CHECK(lease.client.TryTake() == TakeResult::kTaken);
  CHECK(lease.client.TryTake() == TakeResult::kAlreadyTaken);
  CHECK(lease.daemon.Cancel() == CancelResult::kTaken);
  CHECK(lease.daemon.Read() == kClosedAndTaken);
  lease.client.Open();
  CHECK(lease.daemon.Read() == kOpenAndIdle);
  CHECK(lease.client.TryTake() == TakeResult::kOpen);
}

TEST_CASE("Cancel reopens a word that users hold, and finds nothing to cancel in an open one") {
  Lease lease;
  lease.client.Open();
  CHECK(lease.daemon.Cancel() == CancelResult::kNotClosed);
  REQUIRE(lease.client.Enter(Late()) == EnterResult::kEntered);
  REQUIRE(lease.daemon.Close() == CloseResult::kClosed);
  CHECK(lease.daemon.Cancel() == CancelResult::kCancelled);
  CHECK(lease.daemon.Read() == UseWordState{false, false, 1});
  lease.client.Leave();
  CHECK_FALSE(lease.ReaderIsWoken(0));
}

TEST_CASE("Enter on a closed word gives up at its deadline, wakes the reader, and leaves no count behind") {
  Lease lease;
  lease.client.Open();
  REQUIRE(lease.daemon.CloseIfIdle() == CloseResult::kClosed);
  const absl::Time before = absl::Now();
  CHECK(lease.client.Enter(before + absl::Milliseconds(50)) == EnterResult::kTimedOut);
  CHECK(absl::Now() - before >= absl::Milliseconds(50));
  CHECK(lease.client.Enter(absl::InfinitePast()) == EnterResult::kTimedOut);
  CHECK(lease.client.Enter(absl::UnixEpoch() - absl::Hours(1)) == EnterResult::kTimedOut);
  CHECK(lease.ReaderIsWoken(0));
  CHECK(lease.daemon.Read() == UseWordState{true, false, 0});
}

TEST_CASE("An open word is entered also after the deadline") {
  Lease lease;
  lease.client.Open();
  CHECK(lease.client.Enter(absl::InfinitePast()) == EnterResult::kEntered);
}

TEST_CASE("A sleeping user is woken by Open, by Cancel and by Stop") {
  Lease lease;
  std::atomic<int> result{-1};
  std::thread user([&] { result = static_cast<int>(lease.client.Enter(Late())); });
  SECTION("Open") {
    absl::SleepFor(absl::Milliseconds(20));
    lease.client.Open();
    user.join();
    CHECK(result == static_cast<int>(EnterResult::kEntered));
    CHECK(lease.daemon.Read() == UseWordState{false, false, 1});
  }
  SECTION("Cancel") {
    lease.client.Open();
    user.join();
    lease.client.Leave();
    REQUIRE(lease.daemon.Close() == CloseResult::kClosed);
    user = std::thread([&] { result = static_cast<int>(lease.client.Enter(absl::InfiniteFuture())); });
    absl::SleepFor(absl::Milliseconds(20));
    CHECK(lease.daemon.Cancel() == CancelResult::kCancelled);
    user.join();
    CHECK(result == static_cast<int>(EnterResult::kEntered));
  }
  SECTION("Stop") {
    absl::SleepFor(absl::Milliseconds(20));
    lease.daemon.Stop(7);
    user.join();
    CHECK(result == static_cast<int>(EnterResult::kStopped));
    CHECK(lease.client.stop_code() == 7);
    CHECK(lease.client.Enter(Late()) == EnterResult::kStopped);
    lease.client.Resume();
    CHECK(lease.client.Enter(Soon()) == EnterResult::kTimedOut);
    lease.client.Open();
    CHECK(lease.client.Enter(Late()) == EnterResult::kEntered);
  }
}

TEST_CASE("Uncontended, a use allocates nothing") {
  Lease lease;
  lease.client.Open();
  const int before = allocations;
  for (int i = 0; i < 1000; ++i) {
    const EnterResult result = lease.client.Enter(absl::InfiniteFuture());
    lease.client.EnterNested();
    lease.client.Leave();
    lease.client.Leave();
    if (result != EnterResult::kEntered) break;
  }
  const int during = allocations - before;
  CHECK(during == 0);
  const auto* allocated = new std::vector<int>(1);
  CHECK(allocations > before + during);  // the count counts
  delete allocated;
  CHECK(lease.daemon.Read() == kOpenAndIdle);
}

// The kernel kills a child of this filter at its first system call but exit_group, so the count comes from the kernel.
void ForbidSystemCalls() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  };
  sock_fprog program{sizeof(filter) / sizeof(filter[0]), filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    _exit(99);
  }
}

TEST_CASE("Uncontended, a use makes no system call; the last user of a closed word makes one") {
  Lease lease;
  lease.client.Open();
  const int open_status = InChild([&] {
    ForbidSystemCalls();
    for (int i = 0; i < 1000; ++i) {
      if (lease.client.Enter(absl::InfiniteFuture()) != EnterResult::kEntered) return 1;
      lease.client.Leave();
    }
    syscall(SYS_exit_group, 0);
    return 2;
  });
  CHECK(WIFEXITED(open_status));
  CHECK(WEXITSTATUS(open_status) == 0);
  const int closed_status = InChild([&] {
    ForbidSystemCalls();
    const EnterResult result = lease.client.Enter(absl::InfiniteFuture());
    lease.daemon.Close();
    lease.client.Leave();
    syscall(SYS_exit_group, static_cast<int>(result));
    return 2;
  });
  CHECK(WIFSIGNALED(closed_status));
  CHECK(WTERMSIG(closed_status) == SIGSYS);
}
TEST_CASE("Whatever a client writes into the page, the daemon's calls come back") {
  Lease lease;
  void* page = mmap(nullptr, kUseWordPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, lease.fd.get(), 0);
  REQUIRE(page != MAP_FAILED);
  std::atomic<uint64_t>& word = static_cast<UseWordPage*>(page)->word;
  const uint64_t values[] = {0, 1, ~uint64_t{0}, kUseWordClosed - 1, kUseWordClosed | kUseWordCountMask, kUseWordTaken};
  for (const uint64_t value : values) {
    word = value;
    lease.daemon.Close();
    word = value;
    lease.daemon.CloseIfIdle();
    word = value;
    lease.daemon.Cancel();
    lease.daemon.Read();
    lease.daemon.Stop(1);
  }
  std::atomic<bool> done{false};
  std::thread scribbler([&] {
    for (uint64_t count = 0; !done; ++count) word.store(kUseWordClosed | (count & kUseWordCountMask));
  });
  for (int i = 0; i < 1000; ++i) {
    lease.daemon.Close();
    lease.daemon.Cancel();
  }
  done = true;
  scribbler.join();
  REQUIRE(munmap(page, kUseWordPageBytes) == 0);
}

// The client's reader for the stress tests: takes the cells when asked, marks them unmapped, and grants itself the next
// generation. `cells` is what the users touch.
void TakeAndReopen(Lease& lease, std::atomic<bool>& revoke, int& cells) {
  while (true) {
    switch (lease.client.TryTake()) {
      case TakeResult::kInUse:
        if (!lease.ReaderIsWoken(30'000)) return;
        continue;
      case TakeResult::kOpen:
        return;
      case TakeResult::kTaken:
      case TakeResult::kAlreadyTaken:
        cells = 0;  // no atomic: nobody else may be here, and the thread sanitizer watches
        std::this_thread::yield();
        cells = 1;
        revoke = false;
        lease.client.Open();
        return;
    }
  }
}

TEST_CASE("Under stress no user sees unmapped cells and nobody sleeps for ever") {
  constexpr int kUsers = 4, kRounds = 300;
  Lease lease;
  int cells = 1;
  std::atomic<bool> revoke{false}, done{false};
  std::atomic<int> wrong{0}, late{0};
  lease.client.Open();
  std::thread reader([&] {
    while (!done) {
      if (revoke) TakeAndReopen(lease, revoke, cells);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> users;
  for (int i = 0; i < kUsers; ++i) {
    users.emplace_back([&] {
      while (!done) {
        if (lease.client.Enter(Late()) != EnterResult::kEntered) {
          ++late;
          return;
        }
        if (cells != 1) ++wrong;
        lease.client.Leave();
      }
    });
  }
  int cancelled = 0;
  for (int round = 0; round < kRounds; ++round) {
    const CloseResult closed = round % 3 == 0 ? lease.daemon.CloseIfIdle() : lease.daemon.Close();
    if (closed != CloseResult::kClosed) continue;
    revoke = true;
    if (round % 2 == 0 && lease.daemon.Cancel() == CancelResult::kCancelled) {
      ++cancelled;
      revoke = false;
      continue;
    }
    while (revoke || lease.daemon.Read().closed) std::this_thread::yield();
  }
  done = true;
  for (std::thread& user : users) user.join();
  reader.join();
  CHECK(wrong == 0);
  CHECK(late == 0);
  CHECK(lease.daemon.Read() == kOpenAndIdle);
}

TEST_CASE("Two processes share one page: users in one, the daemon in the other") {
  constexpr uint64_t kRounds = 200, kUses = 100;
  Lease lease;
  lease.client.Open();
  const UniqueFd used(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));  // counts the uses
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {  // the client: uses the lease until it is stopped
    const uint64_t one = 1;
    while (true) {
      const EnterResult result = lease.client.Enter(Late());
      if (result == EnterResult::kStopped) _exit(0);
      if (result == EnterResult::kTimedOut) _exit(2);
      if (write(used.get(), &one, sizeof(one)) != sizeof(one)) _exit(3);
      lease.client.Leave();
    }
  }
  // The eventfd is shared too, so this process can be the reader beside being the daemon.
  uint64_t uses = 0;
  for (uint64_t round = 0; round < kRounds || uses < kUses; ++round) {
    REQUIRE(lease.daemon.Close() == CloseResult::kClosed);
    TakeResult taken = lease.client.TryTake();
    while (taken == TakeResult::kInUse) {
      REQUIRE(lease.ReaderIsWoken(30'000));
      taken = lease.client.TryTake();
    }
    REQUIRE(taken == TakeResult::kTaken);
    lease.client.Open();
    uint64_t more = 0;
    if (read(used.get(), &more, sizeof(more)) == sizeof(more)) uses += more;
    std::this_thread::yield();
  }
  REQUIRE(lease.daemon.Close() == CloseResult::kClosed);
  lease.daemon.Stop(3);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(lease.daemon.Read() == UseWordState{true, false, 0});
}

}  // namespace
}  // namespace residency
