// SPDX-License-Identifier: Apache-2.0
//
// The search through the states of use_word_model.h. It visits every reachable state once, breadth first, so that what
// it finds wrong it tells with a shortest trace.
#ifndef RESIDENCY_TESTS_USE_WORD_SEARCH_H_
#define RESIDENCY_TESTS_USE_WORD_SEARCH_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "mechanisms/use_word.h"
#include "tests/use_word_model.h"

namespace residency {

struct Outcome {
  uint64_t result;
  World world;
};

// At most three; none where the operation has to wait.
class Outcomes {
 public:
  Outcomes() = default;
  Outcomes(uint64_t result, const World& world) { Add(result, world); }  // NOLINT: an outcome is a list of one
  void Add(uint64_t result, const World& world) { outcomes_[count_++] = {result, world}; }
  Outcome* begin() { return outcomes_.data(); }
  Outcome* end() { return outcomes_.data() + count_; }

 private:
  std::array<Outcome, 3> outcomes_;
  int count_ = 0;
};

inline bool Push(Queue& queue, uint64_t packet) {
  if (queue.length == queue.packets.size()) return false;
  queue.packets[queue.length++] = packet;
  return true;
}

inline uint64_t Pop(Queue& queue) {
  const uint16_t packet = queue.packets[0];
  std::copy(queue.packets.begin() + 1, queue.packets.end(), queue.packets.begin());
  queue.packets[--queue.length] = 0;
  return packet;
}

// An operation on memory; returns the value before, as all of them do.
inline uint64_t Access(World& world, const Op& op) {
  const auto apply = [&op](auto& cell) -> uint64_t {
    using T = std::remove_reference_t<decltype(cell)>;
    const T before = cell, argument = static_cast<T>(op.argument);
    switch (op.kind) {
      case OpKind::kStore:
        cell = argument;
        break;
      case OpKind::kAdd:
        cell += argument;
        break;
      case OpKind::kSub:
        cell -= argument;
        break;
      case OpKind::kOr:
        cell |= argument;
        break;
      case OpKind::kAnd:
        cell &= argument;
        break;
      case OpKind::kCas:
        if (before == op.expected) cell = argument;
        break;
      default:
        break;
    }
    // A store learns nothing, and a result that nobody looks at would only tell states apart.
    return op.kind == OpKind::kStore ? 0 : before;
  };
  if (op.cell == kWord) return apply(world.word);
  return op.cell == kSequence ? apply(world.sequence) : apply(world.stop);
}

// What a search answers that has merged what it must not.
inline constexpr char kSearchIsWrong[] = "merged histories differ";

// The search, and the model of everything that is not the code under test.
class Search {
 public:
  struct Result {
    uint64_t states = 0;
    uint64_t steps = 0;
    std::string wrong;  // empty: nothing
    std::string trace;
  };

  struct Options {
    bool deadlines = false;    // a sleeper may give up at any moment
    bool daemon_dies = false;  // at any moment, and before the end for certain
  };

  Search(const Options& options, Piece piece)
      : options_(options), histories_(std::move(piece)), slots_(1 << 16, kFree) {}

  // Begins in `world`, with each actor in its phase of `phases`.
  Result Run(World world, const std::array<int, kActors>& phases) {
    for (int actor = 0; actor < kActors; ++actor) {
      world.node[actor] = histories_.Start(static_cast<ActorId>(actor), phases[actor]);
    }
    Add(world, {0, kDaemon, 0});
    for (uint32_t current = 0; current < states_.size() && result_.wrong.empty(); ++current) Expand(current);
    if (result_.wrong.empty() && !EveryRunEnds()) result_.wrong = "a run need not end";
    if (result_.wrong.empty() && !histories_.CheckMerges()) result_.wrong = kSearchIsWrong;
    result_.states = states_.size();
    return result_;
  }

 private:
  static constexpr uint64_t kMostStates = 4'000'000;
  static constexpr uint32_t kFree = ~uint32_t{0};

  void Expand(uint32_t current) {
    const World world = states_[current];
    bool moved = false;
    for (int actor = 0; actor < kActors; ++actor) {
      const Node& node = histories_.node(world.node[actor]);
      if (node.done) continue;
      for (Outcome& outcome : Perform(world, static_cast<ActorId>(actor), node.pending)) {
        moved = true;
        outcome.world.node[actor] = histories_.Next(world.node[actor], outcome.result);
        Follow(current, static_cast<ActorId>(actor), outcome);
      }
    }
    if (options_.daemon_dies && world.hung_up == 0) {
      moved = true;
      Outcome death{0, world};
      death.world.hung_up = 1;
      death.world.node[kDaemon] = histories_.Start(kDaemon, kDone);
      Follow(current, kDaemon, death);
    }
    if (!moved) CheckEnd(world, current);
  }

  void Follow(uint32_t current, ActorId actor, const Outcome& outcome) {
    const uint32_t next = Add(outcome.world, {current, actor, outcome.result});
    edges_.push_back({current, next});
    Check(outcome.world, next);
    ++result_.steps;
  }

  // Every outcome of `op` in `world`; none where it has to wait.
  Outcomes Perform(const World& world, ActorId actor, const Op& op) {
    World after = world;
    const uint32_t self = 1u << actor;
    switch (op.kind) {
      case OpKind::kSleepIf:
        if (world.sequence != op.argument) return {0, after};
        after.sleepers |= self;
        return {1, after};
      case OpKind::kSleep:
        if ((world.sleepers & self) == 0) return {1, after};
        after.sleepers &= ~self;
        return options_.deadlines ? Outcomes(0, after) : Outcomes();
      case OpKind::kWakeSleepers:
        after.sleepers = 0;
        return {0, after};
      case OpKind::kWakeReader:
        after.event = 1;
        return {0, after};
      case OpKind::kPoll:
        return Poll(world);
      case OpKind::kDrain:
        after.event = 0;
        return {0, after};
      case OpKind::kReceive:
        if (world.to_daemon.length == 0) return {};
        return {Pop(after.to_daemon), after};
      case OpKind::kChoose:
        return Choices(after);
      case OpKind::kSendReader:
      case OpKind::kSendDaemon:
        if (!Push(op.kind == OpKind::kSendReader ? after.to_reader : after.to_daemon, op.argument)) {
          wrong_ = "a queue of the model is too short";
        }
        return {0, after};
      case OpKind::kMap:
      case OpKind::kUnmap:
      case OpKind::kTakeCells:
      case OpKind::kReturnCells:
        return {0, OnCells(world, op)};
      default: {
        const uint64_t before = Access(after, op);
        return {before, after};
      }
    }
  }

  // Whatever is ready may come first.
  static Outcomes Poll(const World& world) {
    Outcomes outcomes;
    if (world.event != 0) outcomes.Add(kWakeUp, world);
    World after = world;
    if (world.to_reader.length != 0) {
      const uint64_t packet = Pop(after.to_reader);
      outcomes.Add(packet, after);
    }
    if (world.to_reader.length == 0 && world.hung_up == 1) {
      after.hung_up = 2;
      outcomes.Add(kHangUp, after);
    }
    return outcomes;
  }

  static Outcomes Choices(const World& world) {
    Outcomes outcomes;
    for (uint64_t choice = 0; choice < 3; ++choice) outcomes.Add(choice, world);
    return outcomes;
  }

  World OnCells(World world, const Op& op) {
    switch (op.kind) {
      case OpKind::kMap:
        if (world.elsewhere) wrong_ = "cells are mapped that somebody else has";
        world.mapped = op.argument;
        break;
      case OpKind::kUnmap:
        world.mapped = 0;
        break;
      case OpKind::kTakeCells:
        if (world.mapped != 0) wrong_ = "the daemon takes cells that are mapped";
        world.elsewhere = 1;
        break;
      case OpKind::kReturnCells:
        world.elsewhere = 0;
        break;
      default:
        break;
    }
    return world;
  }

  void Check(const World& world, uint32_t state) {
    for (int user : {kUserA, kUserB}) {
      if (!histories_.node(world.node[user]).inside) continue;
      if (world.mapped == 0) wrong_ = "a user is inside and nothing is mapped";
      if ((world.word & kUseWordTaken) != 0) wrong_ = "a user is inside and the word is taken";
    }
    if (states_.size() > kMostStates) wrong_ = "more states than the limit";
    if (!wrong_.empty()) Fail(wrong_, state);
  }

  // Nobody can move: all have to be done, and the word has to be at rest.
  void CheckEnd(const World& world, uint32_t state) {
    for (int actor : {kUserA, kUserB, kDaemon}) {
      if (!histories_.node(world.node[actor]).done) Fail(absl::StrCat(kActorNames[actor], " waits for ever"), state);
    }
    const bool at_rest = world.mapped != 0 ? world.word == 0 && !world.elsewhere
                                           : world.word == (kUseWordClosed | kUseWordTaken) && world.stop != 0;
    if (!at_rest) Fail(absl::StrCat("ends with the word ", absl::Hex(world.word)), state);
  }

  // How a state was reached first.
  struct Step {
    uint32_t from;
    ActorId actor;
    uint64_t result;
  };

  // The index of `world`, which is new or known.
  uint32_t Add(const World& world, const Step& step) {
    if (2 * states_.size() >= slots_.size()) Grow();
    uint32_t& slot = Slot(world);
    if (slot == kFree) {
      slot = states_.size();
      states_.push_back(world);
      steps_.push_back(step);
    }
    return slot;
  }

  uint32_t& Slot(const World& world) {
    uint64_t words[sizeof(World) / 8];
    memcpy(words, &world, sizeof(words));
    uint64_t hash = 0;
    for (const uint64_t word : words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at] != kFree && !(states_[slots_[at]] == world)) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  void Grow() {
    slots_.assign(2 * slots_.size(), kFree);
    for (uint32_t state = 0; state < states_.size(); ++state) Slot(states_[state]) = state;
  }

  // Kahn's algorithm: repeatedly removes states that nothing leads to. A cycle cannot be removed.
  bool EveryRunEnds() const {
    std::vector<uint32_t> incoming(states_.size()), first(states_.size() + 1), open = {0};
    for (const auto& [from, to] : edges_) ++incoming[to], ++first[from + 1];
    for (size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
    uint64_t removed = 0;
    while (!open.empty()) {
      const uint32_t state = open.back();
      open.pop_back();
      ++removed;
      // States are expanded in order, so the edges of one lie together.
      for (uint32_t edge = first[state]; edge < first[state + 1]; ++edge) {
        if (--incoming[edges_[edge].second] == 0) open.push_back(edges_[edge].second);
      }
    }
    return removed == states_.size();
  }

  std::string Describe(uint32_t state) const {
    const Step& step = steps_[state];
    if (states_[state].hung_up == 1 && states_[step.from].hung_up == 0) return "daemon: dies";
    const Op& op = histories_.node(states_[step.from].node[step.actor]).pending;
    constexpr const char* kCells[] = {"word", "sequence", "stop"};
    return absl::StrCat(kActorNames[step.actor], ": ", kOpNames[static_cast<int>(op.kind)], " (", kCells[op.cell], ") ",
                        absl::Hex(op.argument), " -> ", absl::Hex(step.result));
  }

  void Fail(std::string what, uint32_t state) {
    if (!result_.wrong.empty()) return;
    result_.wrong = std::move(what);
    std::vector<std::string> trace;
    for (; state != 0; state = steps_[state].from) trace.push_back(Describe(state));
    result_.trace = absl::StrJoin(trace.rbegin(), trace.rend(), "\n");
  }

  const Options options_;
  Histories histories_;
  std::vector<World> states_;
  std::vector<Step> steps_;
  std::vector<uint32_t> slots_;  // a hash table of indices, with linear probing
  std::vector<std::pair<uint32_t, uint32_t>> edges_;
  std::string wrong_;
  Result result_;
};
static_assert(sizeof(World) % 8 == 0);

}  // namespace residency

#endif  // RESIDENCY_TESTS_USE_WORD_SEARCH_H_
