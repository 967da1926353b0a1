// SPDX-License-Identifier: Apache-2.0
//
// The use word: 64 bits in a page that the daemon and one client process share, one page per lease. It decides, without
// a system call, who may touch the lease's cells: the client's users, or the client's reader thread that unmaps them.
//
//   bit 63 CLOSED   no new user may enter
//   bit 62 TAKEN    the reader has the cells: they are unmapped, being unmapped, or not mapped yet
//   bits 0-61       count of users inside, plus those that are just backing out
//
// Who does what, and on which thread:
//  - The daemon makes the page (MakeUseWordPage: CLOSED|TAKEN, 0), grants a generation, and is told by the client once
//    it is mapped and open. Only then does it Close (or CloseIfIdle) and send a Revoke packet. It may Cancel until the
//    reader has taken the cells. It calls bytes free only after Released.
//  - A user (any thread of the client) calls Enter, touches the cells, calls Leave.
//  - The reader (one thread of the client) reads packets in order. On a Revoke, and on every wake-up of the eventfd
//    while a Revoke is pending, it calls TryTake and does as TakeResult says. After it has mapped a generation it calls
//    Open and tells the daemon.
//
// A revocation that was cancelled leaves its packet behind, which the reader may read when the word is closed for a
// later one: the reader then answers the older packet, finds kAlreadyTaken on the later one and answers that too.
// Revoke and Released therefore name the generation they are about, and the daemon ignores a Released of an older
// generation.
//
// Invariants (tests/use_word_model_test.cc checks them in every state of every interleaving of this very code):
//  1. While a user is inside, TAKEN is clear and the generation is mapped.
//  2. Either TryTake or Cancel wins a revocation, never both: both are a compare-and-swap from CLOSED without TAKEN.
//  3. Whoever brings a closed, untaken word to count 0 wakes the reader, so a reader that found users inside is woken.
//  4. Whoever opens the word, or stops it, bumps `sequence` afterwards and wakes its waiters. A user reads `sequence`
//     before it reads the word, and sleeps only while `sequence` has the value it read: no wake-up is lost.
//
// Memory orders. The word is modified by read-modify-writes only, so every modification continues the release sequence
// of the ones before it.
//  - Open releases what the reader did (the mapping); Enter acquires it, also through the daemon's Cancel in between.
//  - Leave releases what the user did; TryTake acquires it, through all later modifications, before the unmapping.
//  - Enter tests the flag in the value it added to: one location, so it needs no fence against Close. An add that came
//    before the Close is in the count which TryTake compares with zero; one that came after saw CLOSED.
//  - `sequence` and the word are two locations: the bump releases, the waiter's load acquires, so a waiter that sees
//  the
//    new sequence sees the open word; one that saw the old sequence is refused by FUTEX_WAIT's comparison or is woken.
//  - Close is followed by a packet: the socket's locks order it before the reader's TryTake.
//
// A client is not trusted. It can write anything into the page, and the daemon then reads nonsense about that client's
// lease and no other: no daemon function loops without bound, indexes by, or waits for what it reads here, and the
// seals on the file rule out a fault. A wrong word can only make the client's own revocation run into its deadline.
#ifndef RESIDENCY_MECHANISMS_USE_WORD_H_
#define RESIDENCY_MECHANISMS_USE_WORD_H_

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/unique_fd.h"

namespace residency {

inline constexpr uint64_t kUseWordPageBytes = 4096;
inline constexpr uint64_t kUseWordClosed = uint64_t{1} << 63;
inline constexpr uint64_t kUseWordTaken = uint64_t{1} << 62;
inline constexpr uint64_t kUseWordCountMask = kUseWordTaken - 1;
// An honest client changes a closed word at most twice per thread before the thread sleeps, so this many attempts fail
// only against a client that keeps writing on purpose.
inline constexpr int kUseWordCancelAttempts = 1000;

// The layout of the page. The word has a cache line of its own because users of all threads hit it.
struct UseWordPage {
  alignas(64) std::atomic<uint64_t> word;
  alignas(64) std::atomic<uint32_t> sequence;  // a futex; its value means nothing, its changes do
  std::atomic<uint32_t> stop;                  // not 0: waiting is pointless, Enter says kStopped
};
static_assert(sizeof(UseWordPage) <= kUseWordPageBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The word at one moment; it may have changed since.
struct UseWordState {
  bool closed = false;
  bool taken = false;
  uint64_t count = 0;

  bool operator==(const UseWordState&) const = default;
};

enum class EnterResult {
  kEntered,   // inside; a Leave must follow
  kTimedOut,  // outside: still closed at the deadline
  kStopped,   // outside: somebody called Stop; stop_code() says with which code
};

// What the reader does next about a pending Revoke.
enum class TakeResult {
  kTaken,         // wait for the device work, unmap, answer Released; the Revoke is no longer pending
  kAlreadyTaken,  // taken before for this generation: unmap what is not yet unmapped, answer Released
  kInUse,         // keep it pending; the last user that leaves wakes the reader
  kOpen,          // the daemon has cancelled: forget the Revoke
};

enum class CloseResult {
  kClosed,         // send the Revoke
  kInUse,          // only CloseIfIdle: users are inside, nothing was changed
  kAlreadyClosed,  // it was closed: not live, or the client wrote it; nothing was changed
};

enum class CancelResult {
  kCancelled,  // the client goes on using the generation it has; no Released will come
  kTaken,      // too late: the reader has the cells (or the client keeps writing the word); await Released
  kNotClosed,  // there was nothing to cancel
};

// The protocol over any memory, so that the model checker runs this code and no imitation of it. Memory is a copyable
// view with word(), sequence() and stop() (atomics, or things like them), and
//   bool WaitSequence(uint32_t seen, absl::Time deadline)  sleeps while sequence is `seen`; false: deadline passed
//   void WakeSequence()                                    wakes all that sleep there, in any process
//   void WakeReader()                                      makes the reader call TryTake soon
template <typename Memory>
class BasicUseWord {
 public:
  explicit BasicUseWord(Memory memory) : memory_(memory) {}

  // ---- For users: any thread of the client. ----

  // Goes inside, or sleeps until the word is open and goes inside, until `deadline`. An open word is one atomic
  // addition: no system call, no allocation; an open word is entered also when the deadline has passed. A thread that
  // is inside already must not call this (it would wait for itself), but EnterNested.
  EnterResult Enter(absl::Time deadline) {
    if ((memory_.word().fetch_add(1, std::memory_order_acquire) & kUseWordClosed) == 0) return EnterResult::kEntered;
    return BackOutAndWait(deadline);
  }

  // Goes inside once more, for a thread that is inside. Never waits: its count holds the reader off, closed or not.
  void EnterNested() { memory_.word().fetch_add(1, std::memory_order_relaxed); }

  // Ends one Enter or EnterNested. A system call only where the word is closed and this was the last user. After the
  // subtraction it touches nothing but the reader's eventfd, which must therefore outlive every lease.
  void Leave() {
    const uint64_t left = memory_.word().fetch_sub(1, std::memory_order_release) - 1;
    if (left == kUseWordClosed) memory_.WakeReader();
  }

  // The code that Stop gave, 0 for none.
  uint32_t stop_code() { return memory_.stop().load(std::memory_order_acquire); }

  // ---- For the client's reader thread. ----

  // Takes the cells if the word is closed and nobody is inside. Drain the eventfd before the call, not after it.
  TakeResult TryTake() {
    uint64_t word = kUseWordClosed;
    if (memory_.word().compare_exchange_strong(word, kUseWordClosed | kUseWordTaken, std::memory_order_acquire,
                                               std::memory_order_relaxed)) {
      return TakeResult::kTaken;
    }
    if ((word & kUseWordTaken) != 0) return TakeResult::kAlreadyTaken;
    return (word & kUseWordClosed) != 0 ? TakeResult::kInUse : TakeResult::kOpen;
  }

  // Lets users in. The word is TAKEN and a new generation is mapped. Keeps the count: a user that is backing out has
  // added one and will subtract it.
  void Open() {
    memory_.word().fetch_and(~(kUseWordClosed | kUseWordTaken), std::memory_order_release);
    WakeWaiters();
  }

  // After a Stop: from now on users wait again for the next generation instead of failing.
  void Resume() { memory_.stop().store(0, std::memory_order_release); }

  // ---- For the reader once the daemon is gone, or for the daemon about a lease that it has closed for good. ----

  // Closes the word and makes every user that waits or comes later answer kStopped with `code` (not 0) until Resume:
  // the lease ended, or was revoked by force. Users that are inside stay inside, and TryTake works as ever. Never while
  // a Cancel may still come, which would open the word behind this: a client that wants to end a lease asks the daemon,
  // and the daemon closes it.
  void Stop(uint32_t code) {
    memory_.stop().store(code, std::memory_order_release);
    memory_.word().fetch_or(kUseWordClosed, std::memory_order_acq_rel);
    WakeWaiters();
  }

  // ---- For the daemon. ----

  // Keeps new users out of a live lease. Send the Revoke after this returned, never before.
  CloseResult Close() {
    const uint64_t before = memory_.word().fetch_or(kUseWordClosed, std::memory_order_acq_rel);
    return (before & kUseWordClosed) == 0 ? CloseResult::kClosed : CloseResult::kAlreadyClosed;
  }

  // Close, but only if nobody is inside: what an eviction of idle models uses. A user that is just backing out counts.
  CloseResult CloseIfIdle() {
    uint64_t word = 0;
    if (memory_.word().compare_exchange_strong(word, kUseWordClosed, std::memory_order_acq_rel,
                                               std::memory_order_relaxed)) {
      return CloseResult::kClosed;
    }
    return (word & kUseWordClosed) != 0 ? CloseResult::kAlreadyClosed : CloseResult::kInUse;
  }

  // Takes a Close back and lets waiting users in, unless the reader was faster. At most kUseWordCancelAttempts tries;
  // after those the word counts as taken.
  CancelResult Cancel() {
    uint64_t word = memory_.word().load(std::memory_order_relaxed);
    for (int attempt = 0; attempt < kUseWordCancelAttempts; ++attempt) {
      if ((word & kUseWordTaken) != 0) return CancelResult::kTaken;
      if ((word & kUseWordClosed) == 0) return CancelResult::kNotClosed;
      if (memory_.word().compare_exchange_strong(word, word & ~kUseWordClosed, std::memory_order_acq_rel,
                                                 std::memory_order_relaxed)) {
        WakeWaiters();
        return CancelResult::kCancelled;
      }
    }
    return CancelResult::kTaken;
  }

  // ---- For everybody. ----

  UseWordState Read() {
    const uint64_t word = memory_.word().load(std::memory_order_acquire);
    return {(word & kUseWordClosed) != 0, (word & kUseWordTaken) != 0, word & kUseWordCountMask};
  }

 protected:
  EnterResult BackOutAndWait(absl::Time deadline) {
    do {
      Leave();  // the addition that found the word closed is taken back, and may have been what held the reader off
      while (true) {
        const uint32_t seen = memory_.sequence().load(std::memory_order_acquire);
        if ((memory_.word().load(std::memory_order_acquire) & kUseWordClosed) == 0) break;
        if (memory_.stop().load(std::memory_order_acquire) != 0) return EnterResult::kStopped;
        if (!memory_.WaitSequence(seen, deadline)) return EnterResult::kTimedOut;
      }
    } while ((memory_.word().fetch_add(1, std::memory_order_acquire) & kUseWordClosed) != 0);
    return EnterResult::kEntered;
  }

  void WakeWaiters() {
    memory_.sequence().fetch_add(1, std::memory_order_release);
    memory_.WakeSequence();
  }

  Memory memory_;
};

// The page itself, and the reader's eventfd.
class SharedUseMemory {
 public:
  // `reader_eventfd` (non-blocking; borrowed; -1 in the daemon, which never leaves) is written by WakeReader.
  SharedUseMemory(UseWordPage* page, int reader_eventfd) : page_(page), reader_eventfd_(reader_eventfd) {}

  std::atomic<uint64_t>& word() { return page_->word; }
  std::atomic<uint32_t>& sequence() { return page_->sequence; }
  std::atomic<uint32_t>& stop() { return page_->stop; }
  bool WaitSequence(uint32_t seen, absl::Time deadline);
  void WakeSequence();
  void WakeReader();

 private:
  UseWordPage* page_;
  int reader_eventfd_;
};

// A view of a mapped page; copy it freely, it must not outlive the mapping.
using UseWord = BasicUseWord<SharedUseMemory>;

// A new memfd that holds one page, CLOSED|TAKEN with count 0, sealed so that nobody can resize it. The daemon makes it
// and sends it along with the lease. RESOURCE_EXHAUSTED where there are no descriptors or memory left.
absl::StatusOr<UniqueFd> MakeUseWordPage();

// Owns the mapping of one page.
class UseWordMapping {
 public:
  // Maps the page behind `fd`, which stays the caller's and may be closed. INVALID_ARGUMENT/BAD_USE_WORD where it is
  // not a file of kUseWordPageBytes with the seals of MakeUseWordPage.
  static absl::StatusOr<UseWordMapping> Map(int fd);

  UseWordMapping(UseWordMapping&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  UseWordMapping& operator=(UseWordMapping&& other) noexcept;
  ~UseWordMapping();

  // For the daemon.
  UseWord word() const { return UseWord(SharedUseMemory(page_, -1)); }
  // For the client: a Leave that empties a closed word writes to `reader_eventfd`.
  UseWord word(int reader_eventfd) const { return UseWord(SharedUseMemory(page_, reader_eventfd)); }

 private:
  explicit UseWordMapping(UseWordPage* page) : page_(page) {}

  UseWordPage* page_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_USE_WORD_H_
