// SPDX-License-Identifier: Apache-2.0
//
// An exhaustive model check of the use word: two users, the client's reader and the daemon run the code of use_word.h
// itself over a modelled memory, in every interleaving of their atomic operations, sleeps, wake-ups and packets.
//
// Here are the actors and the scenarios; use_word_model.h has the world, use_word_search.h the search through it.
//
// What it shows, in every state: nobody is inside while the word is taken or nothing is mapped; the daemon has the
// cells only when they are unmapped. Every state without a next one is one where everybody is done: no deadlock, no
// lost wake-up. The graph of states has no cycle: every run ends, however unfairly it is scheduled.
//
// What it does not cover: orders weaker than sequential consistency (argued in use_word.h, and met in part by the
// thread sanitizer's run of use_word_test), clocks (a deadline passes at any moment, or never), spurious wake-ups of
// the futex (the waiter looks again), the wrap of the sequence after 2^32 openings within one wait, more than two
// users.
#include "tests/use_word_model.h"

#include <array>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/use_word.h"
#include "tests/use_word_mutants.h"
#include "tests/use_word_search.h"

namespace residency {
namespace {

struct Scenario {
  std::string name;
  std::array<int, 2> rounds = {2, 1};  // uses by each user
  int closings = 2;                    // by the daemon
  bool if_idle = false;                // the first closing is CloseIfIdle
  bool cancels = false;                // the daemon may cancel each closing at any time
  bool starts_unmapped = false;        // begins with a word as MakeUseWordPage makes it
  bool nests = false;                  // user A enters once more inside
  bool deadlines = false;              // a wait may end at any time
  bool stops = false;                  // the daemon may use force instead of waiting for Released
  bool daemon_dies = false;            // at any moment
  // Breaches of the rules that use_word.h gives to the callers.
  bool revokes_before_closing = false;
  bool ignores_generations = false;
  bool drains_after_taking = false;
};

// The actors. A phase is what an actor remembers between two pieces of its work. Forgetting the details of earlier
// pieces keeps the number of states down.

// A user's phase: 2 * uses so far, + 1 while inside.
template <typename Word>
int UserPiece(const Scenario& scenario, ActorId actor, int phase, Replay& replay) {
  if (phase == 2 * scenario.rounds[actor]) return kDone;
  Word word{ModelMemory(&replay)};
  if (phase % 2 == 0) {
    const EnterResult result = word.Enter(absl::InfiniteFuture());
    if (result == EnterResult::kStopped) return kDone;
    return result == EnterResult::kEntered ? phase + 1 : phase + 2;
  }
  replay.SetInside();
  if (scenario.nests && actor == kUserA) {
    word.EnterNested();
    word.Leave();
  }
  replay.LeavesWithNextOp();
  word.Leave();
  return phase + 1;
}

// The reader as the client has it: one thing at a time.
enum class ReaderStep : int { kPoll, kDrain, kTry, kDrainLate, kStop, kUnmap, kAnswer, kMap, kOpen, kReport };

struct ReaderPhase {
  ReaderStep step = ReaderStep::kPoll;
  int pending = 0;      // the generation of the Revoke that is pending, 0 for none
  int mapped = 0;       // the generation that is mapped, or is being mapped
  int hung_up = 0;      // the daemon hung up
  int drains_late = 0;  // the eventfd is yet to be drained

  int Pack() const { return static_cast<int>(step) | pending << 4 | mapped << 8 | hung_up << 12 | drains_late << 13; }
  static ReaderPhase Unpack(int phase) {
    return {static_cast<ReaderStep>(phase & 15), phase >> 4 & 15, phase >> 8 & 15, phase >> 12 & 1, phase >> 13 & 1};
  }
};

ReaderStep ReaderPolls(const Scenario& scenario, ReaderPhase& phase, Replay& replay) {
  const uint64_t packet = replay.Do({OpKind::kPoll});
  if (packet == kWakeUp) {
    phase.drains_late = scenario.drains_after_taking;
    return scenario.drains_after_taking ? ReaderStep::kTry : ReaderStep::kDrain;
  }
  if (packet == kHangUp) {
    phase.hung_up = 1;
    return ReaderStep::kStop;
  }
  if (Kind(packet) == kRevoke) {
    phase.pending = Generation(packet);
    return ReaderStep::kTry;
  }
  phase.mapped = Generation(packet);
  return ReaderStep::kMap;
}

template <typename Word>
ReaderStep ReaderTries(Word& word, ReaderPhase& phase) {
  const ReaderStep afterwards = phase.drains_late ? ReaderStep::kDrainLate : ReaderStep::kPoll;
  if (phase.pending == 0 && !(phase.hung_up && phase.mapped != 0)) return afterwards;
  switch (word.TryTake()) {
    case TakeResult::kInUse:
      return afterwards;
    case TakeResult::kOpen:
      phase.pending = 0;
      return afterwards;
    case TakeResult::kAlreadyTaken:
      return phase.mapped != 0 ? ReaderStep::kUnmap : ReaderStep::kAnswer;
    case TakeResult::kTaken:
      return ReaderStep::kUnmap;
  }
  return ReaderStep::kPoll;
}

template <typename Word>
int ReaderPiece(const Scenario& scenario, int packed, Replay& replay) {
  ReaderPhase phase = ReaderPhase::Unpack(packed);
  Word word{ModelMemory(&replay)};
  switch (phase.step) {
    case ReaderStep::kPoll:
      phase.step = ReaderPolls(scenario, phase, replay);
      break;
    case ReaderStep::kDrain:
      replay.Do({OpKind::kDrain});
      phase.step = ReaderStep::kTry;
      break;
    case ReaderStep::kTry:
      phase.step = ReaderTries(word, phase);
      break;
    case ReaderStep::kDrainLate:
      replay.Do({OpKind::kDrain});
      phase.drains_late = 0;
      phase.step = ReaderStep::kPoll;
      break;
    case ReaderStep::kStop:
      word.Stop(1);
      phase.step = ReaderStep::kTry;
      break;
    case ReaderStep::kUnmap:
      replay.Do({OpKind::kUnmap});
      phase.mapped = 0;
      phase.step = ReaderStep::kAnswer;
      break;
    case ReaderStep::kAnswer:
      if (!phase.hung_up) replay.Do({OpKind::kSendDaemon, kWord, static_cast<uint64_t>(kReleased | phase.pending)});
      phase.pending = 0;
      phase.step = phase.drains_late ? ReaderStep::kDrainLate : ReaderStep::kPoll;
      break;
    case ReaderStep::kMap:
      replay.Do({OpKind::kMap, kWord, static_cast<uint64_t>(phase.mapped)});
      phase.step = ReaderStep::kOpen;
      break;
    case ReaderStep::kOpen:
      word.Open();
      phase.step = ReaderStep::kReport;
      break;
    case ReaderStep::kReport:
      replay.Do({OpKind::kSendDaemon, kWord, static_cast<uint64_t>(kMapped | phase.mapped)});
      phase.step = ReaderStep::kPoll;
      break;
  }
  return phase.Pack();
}

enum class DaemonStep : int { kGrant, kAwaitMapped, kClose, kDecide, kCancel, kStop, kAwaitReleased, kTake };

struct DaemonPhase {
  DaemonStep step = DaemonStep::kClose;
  int closings = 0;    // so far
  int generation = 1;  // that is granted, or about to be

  int Pack() const { return static_cast<int>(step) | closings << 4 | generation << 8; }
  static DaemonPhase Unpack(int phase) {
    return {static_cast<DaemonStep>(phase & 15), phase >> 4 & 15, phase >> 8 & 15};
  }
};

// Takes one packet. `then` if it is of `kind` and about this generation; otherwise the daemon keeps waiting.
DaemonStep DaemonAwaits(const Scenario& scenario, PacketKind kind, DaemonStep then, DaemonPhase& phase,
                        Replay& replay) {
  const uint64_t packet = replay.Do({OpKind::kReceive});
  if (Kind(packet) == kReleased && scenario.ignores_generations) return DaemonStep::kTake;
  return Kind(packet) == kind && Generation(packet) == phase.generation ? then : phase.step;
}

// Closes the lease and asks for it back.
template <typename Word>
DaemonStep DaemonCloses(const Scenario& scenario, Word& word, DaemonPhase& phase, Replay& replay) {
  const bool if_idle = scenario.if_idle && phase.closings == 0;
  const Op revoke{OpKind::kSendReader, kWord, static_cast<uint64_t>(kRevoke | phase.generation)};
  ++phase.closings;
  if (scenario.revokes_before_closing) replay.Do(revoke);
  if ((if_idle ? word.CloseIfIdle() : word.Close()) != CloseResult::kClosed) return DaemonStep::kClose;
  if (!scenario.revokes_before_closing) replay.Do(revoke);
  return scenario.cancels || scenario.stops ? DaemonStep::kDecide : DaemonStep::kAwaitReleased;
}

template <typename Word>
int DaemonPiece(const Scenario& scenario, int packed, Replay& replay) {
  DaemonPhase phase = DaemonPhase::Unpack(packed);
  Word word{ModelMemory(&replay)};
  switch (phase.step) {
    case DaemonStep::kGrant:
      replay.Do({OpKind::kReturnCells});
      replay.Do({OpKind::kSendReader, kWord, static_cast<uint64_t>(kGrant | phase.generation)});
      phase.step = DaemonStep::kAwaitMapped;
      break;
    case DaemonStep::kAwaitMapped:
      phase.step = DaemonAwaits(scenario, kMapped, DaemonStep::kClose, phase, replay);
      break;
    case DaemonStep::kClose:
      if (phase.closings < scenario.closings) {
        phase.step = DaemonCloses(scenario, word, phase, replay);
      } else {
        return kDone;
      }
      break;
    case DaemonStep::kDecide: {
      const uint64_t choice = replay.Do({OpKind::kChoose});
      phase.step = choice == 0                       ? DaemonStep::kAwaitReleased
                   : choice == 1 && scenario.cancels ? DaemonStep::kCancel
                   : choice == 2 && scenario.stops   ? DaemonStep::kStop
                                                     : DaemonStep::kAwaitReleased;
      break;
    }
    case DaemonStep::kCancel:
      phase.step = word.Cancel() == CancelResult::kTaken ? DaemonStep::kAwaitReleased : DaemonStep::kClose;
      break;
    case DaemonStep::kStop:
      word.Stop(2);
      return kDone;
    case DaemonStep::kAwaitReleased:
      phase.step = DaemonAwaits(scenario, kReleased, DaemonStep::kTake, phase, replay);
      break;
    case DaemonStep::kTake:
      replay.Do({OpKind::kTakeCells});
      ++phase.generation;
      phase.step = DaemonStep::kGrant;
      break;
  }
  return phase.Pack();
}

template <template <typename> class Word>
Search::Result Explore(const Scenario& scenario) {
  Search search({scenario.deadlines, scenario.daemon_dies}, [&scenario](ActorId actor, int phase, Replay& replay) {
    if (actor == kReader) return ReaderPiece<Word<ModelMemory>>(scenario, phase, replay);
    if (actor == kDaemon) return DaemonPiece<Word<ModelMemory>>(scenario, phase, replay);
    return UserPiece<Word<ModelMemory>>(scenario, actor, phase, replay);
  });
  const int generation = scenario.starts_unmapped ? 0 : 1;
  World world;
  memset(&world, 0, sizeof(world));
  world.word = generation == 0 ? kUseWordClosed | kUseWordTaken : 0;
  world.mapped = generation;
  world.elsewhere = generation == 0;
  ReaderPhase reader;
  reader.mapped = generation;
  DaemonPhase daemon;
  if (generation == 0) daemon.step = DaemonStep::kGrant;
  const Search::Result result = search.Run(world, {0, 0, reader.Pack(), daemon.Pack()});
  std::cout << scenario.name << ": " << result.states << " states, " << result.steps << " steps, "
            << (result.wrong.empty() ? "nothing wrong" : result.wrong) << "\n";
  return result;
}

Scenario Named(std::string name) {
  Scenario scenario;
  scenario.name = std::move(name);
  return scenario;
}

Scenario Revoking() { return Named("revoke twice"); }

Scenario Cancelling() {
  Scenario scenario = Named("revoke or cancel, twice");
  scenario.cancels = true;
  return scenario;
}

Scenario Stopping() {
  Scenario scenario = Named("revoke, cancel or force");
  scenario.cancels = scenario.stops = true;
  scenario.rounds = {1, 1};
  return scenario;
}

void ExpectNothingWrong(const Scenario& scenario) {
  const Search::Result result = Explore<BasicUseWord>(scenario);
  INFO(result.trace);
  CHECK(result.wrong == "");
  // A search that has not met contention has not searched.
  CHECK(result.states > 1000);
}

template <template <typename> class Word>
void ExpectFound(Scenario scenario, const std::string& mistake) {
  scenario.name = absl::StrCat("mistake: ", mistake, ": ", scenario.name);
  INFO(scenario.name);
  const std::string wrong = Explore<Word>(scenario).wrong;
  CHECK(wrong != "");
  CHECK(wrong != kSearchIsWrong);
}

TEST_CASE("Users, reader and daemon agree in every interleaving of two revocations") { ExpectNothingWrong(Revoking()); }

TEST_CASE("They agree when the daemon cancels a revocation at any moment") { ExpectNothingWrong(Cancelling()); }

TEST_CASE("They agree when the daemon closes only an idle word first") {
  Scenario scenario = Named("close if idle, then revoke, or cancel either");
  scenario.rounds = {1, 1};
  scenario.if_idle = scenario.cancels = true;
  ExpectNothingWrong(scenario);
}

TEST_CASE("They agree from a new word on, whose first generation is not mapped yet") {
  Scenario scenario = Named("a new word, revoked once");
  scenario.starts_unmapped = scenario.cancels = true;
  scenario.closings = 1;
  ExpectNothingWrong(scenario);
}

TEST_CASE("A nested use neither waits for itself nor lets the reader in") {
  Scenario scenario = Named("nested uses");
  scenario.nests = scenario.cancels = true;
  scenario.rounds = {1, 1};
  scenario.closings = 1;
  ExpectNothingWrong(scenario);
}

TEST_CASE("A wait that ends at its deadline leaves nothing behind in the word") {
  Scenario scenario = Named("deadlines");
  scenario.rounds = {1, 1};
  scenario.deadlines = scenario.cancels = true;
  ExpectNothingWrong(scenario);
}

TEST_CASE("A revocation by force frees every user that waits and takes the cells from none that is inside") {
  ExpectNothingWrong(Stopping());
}

TEST_CASE("When the daemon dies at any moment, users that wait are freed and the reader gets the cells to unmap") {
  Scenario scenario = Named("the daemon dies");
  scenario.daemon_dies = scenario.cancels = true;
  scenario.rounds = {1, 1};
  ExpectNothingWrong(scenario);
}

TEST_CASE("The search finds a mistake in each part of the protocol") {
  ExpectFound<TakesWithUsersInside>(Revoking(), "the reader ignores the count");
  ExpectFound<ChecksAndThenTakes>(Cancelling(), "the reader checks and takes in two steps");
  ExpectFound<LeavesWithoutWaking>(Revoking(), "Leave does not wake the reader");
  ExpectFound<BacksOutWithoutWaking>(Revoking(), "backing out does not wake the reader");
  ExpectFound<LooksBeforeItAdds>(Revoking(), "Enter looks before it adds");
  ExpectFound<ReadsTheWordBeforeTheSequence>(Revoking(), "a waiter reads the word before the sequence");
  ExpectFound<OpensByStoringZero>(Revoking(), "Open forgets who is backing out");
  ExpectFound<OpensWithoutWaking>(Revoking(), "Open does not wake");
  ExpectFound<BumpsBeforeItOpens>(Revoking(), "Open bumps the sequence too early");
  ExpectFound<CancelsByStoring>(Cancelling(), "Cancel stores what it read");
  ExpectFound<CancelsByClearingTheFlag>(Cancelling(), "Cancel clears the flag of a word just taken");
  ExpectFound<CancelsWithoutWaking>(Cancelling(), "Cancel does not wake");
  ExpectFound<StopsWithoutWaking>(Stopping(), "Stop does not wake");
}

TEST_CASE("The search finds callers that break the rules") {
  Scenario early = Revoking();
  early.revokes_before_closing = true;
  ExpectFound<BasicUseWord>(early, "the daemon sends Revoke before it closes");
  Scenario late = Revoking();
  late.drains_after_taking = true;
  ExpectFound<BasicUseWord>(late, "the reader drains its eventfd after TryTake");
  Scenario mixed = Cancelling();
  mixed.ignores_generations = true;
  ExpectFound<BasicUseWord>(mixed, "the daemon takes an old Released for a new one");
}

}  // namespace
}  // namespace residency
