// SPDX-License-Identifier: Apache-2.0
//
// What a mistake in each part of the protocol looks like: use words that are wrong in one function each, for
// use_word_model_test.cc to show that its search finds them. Each hides what BasicUseWord has under that name.
#ifndef RESIDENCY_TESTS_USE_WORD_MUTANTS_H_
#define RESIDENCY_TESTS_USE_WORD_MUTANTS_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "mechanisms/use_word.h"

namespace residency {

template <typename Memory>
struct TakesWithUsersInside : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  TakeResult TryTake() {
    const uint64_t word = this->memory_.word().load(std::memory_order_acquire);
    if ((word & kUseWordClosed) == 0) return TakeResult::kOpen;
    if ((word & kUseWordTaken) != 0) return TakeResult::kAlreadyTaken;
    this->memory_.word().fetch_or(kUseWordTaken, std::memory_order_acq_rel);
    return TakeResult::kTaken;
  }
};

template <typename Memory>
struct ChecksAndThenTakes : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  TakeResult TryTake() {
    const uint64_t word = this->memory_.word().load(std::memory_order_acquire);
    if ((word & kUseWordClosed) == 0) return TakeResult::kOpen;
    if ((word & kUseWordTaken) != 0) return TakeResult::kAlreadyTaken;
    if (word != kUseWordClosed) return TakeResult::kInUse;
    this->memory_.word().fetch_or(kUseWordTaken, std::memory_order_acq_rel);
    return TakeResult::kTaken;
  }
};

template <typename Memory>
struct LeavesWithoutWaking : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  void Leave() { this->memory_.word().fetch_sub(1, std::memory_order_release); }
};

template <typename Memory>
struct BacksOutWithoutWaking : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  EnterResult Enter(absl::Time deadline) {
    while ((this->memory_.word().fetch_add(1, std::memory_order_acquire) & kUseWordClosed) != 0) {
      this->memory_.word().fetch_sub(1, std::memory_order_release);
      while (true) {
        const uint32_t seen = this->memory_.sequence().load(std::memory_order_acquire);
        if ((this->memory_.word().load(std::memory_order_acquire) & kUseWordClosed) == 0) break;
        this->memory_.WaitSequence(seen, deadline);
      }
    }
    return EnterResult::kEntered;
  }
};

template <typename Memory>
struct LooksBeforeItAdds : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  EnterResult Enter(absl::Time deadline) {
    if ((this->memory_.word().load(std::memory_order_acquire) & kUseWordClosed) != 0) {
      return BasicUseWord<Memory>::Enter(deadline);
    }
    this->memory_.word().fetch_add(1, std::memory_order_acquire);
    return EnterResult::kEntered;
  }
};

template <typename Memory>
struct ReadsTheWordBeforeTheSequence : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  EnterResult Enter(absl::Time deadline) {
    while ((this->memory_.word().fetch_add(1, std::memory_order_acquire) & kUseWordClosed) != 0) {
      this->Leave();
      while ((this->memory_.word().load(std::memory_order_acquire) & kUseWordClosed) != 0) {
        this->memory_.WaitSequence(this->memory_.sequence().load(std::memory_order_acquire), deadline);
      }
    }
    return EnterResult::kEntered;
  }
};

template <typename Memory>
struct OpensByStoringZero : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  void Open() {
    this->memory_.word().store(0, std::memory_order_release);
    this->WakeWaiters();
  }
};

template <typename Memory>
struct OpensWithoutWaking : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  void Open() {
    this->memory_.word().fetch_and(~(kUseWordClosed | kUseWordTaken), std::memory_order_release);
    this->memory_.sequence().fetch_add(1, std::memory_order_release);
  }
};

template <typename Memory>
struct BumpsBeforeItOpens : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  void Open() {
    this->WakeWaiters();
    this->memory_.word().fetch_and(~(kUseWordClosed | kUseWordTaken), std::memory_order_release);
  }
};

template <typename Memory>
struct CancelsByStoring : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  CancelResult Cancel() {
    const uint64_t word = this->memory_.word().load(std::memory_order_relaxed);
    if ((word & kUseWordTaken) != 0) return CancelResult::kTaken;
    this->memory_.word().store(word & ~kUseWordClosed, std::memory_order_release);
    this->WakeWaiters();
    return CancelResult::kCancelled;
  }
};

template <typename Memory>
struct CancelsByClearingTheFlag : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  CancelResult Cancel() {
    if (this->Read().taken) return CancelResult::kTaken;
    this->memory_.word().fetch_and(~kUseWordClosed, std::memory_order_acq_rel);
    this->WakeWaiters();
    return CancelResult::kCancelled;
  }
};

template <typename Memory>
struct CancelsWithoutWaking : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  CancelResult Cancel() {
    uint64_t word = this->memory_.word().load(std::memory_order_relaxed);
    while (true) {
      if ((word & kUseWordTaken) != 0) return CancelResult::kTaken;
      if (this->memory_.word().compare_exchange_strong(word, word & ~kUseWordClosed, std::memory_order_acq_rel,
                                                       std::memory_order_relaxed)) {
        return CancelResult::kCancelled;
      }
    }
  }
};

template <typename Memory>
struct StopsWithoutWaking : BasicUseWord<Memory> {
  using BasicUseWord<Memory>::BasicUseWord;
  void Stop(uint32_t code) {
    this->memory_.stop().store(code, std::memory_order_release);
    this->memory_.word().fetch_or(kUseWordClosed, std::memory_order_acq_rel);
  }
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_USE_WORD_MUTANTS_H_
