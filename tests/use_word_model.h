// SPDX-License-Identifier: Apache-2.0
//
// What use_word_model_test.cc runs the protocol in: a world of shared memory, packets and cells, and actors in it.
//
// How: an actor is a plain function that learns about the world only from the results of its operations. So it need not
// run beside the others: given the results it had so far, running it from its start yields the operation it asks for
// next. Those histories are the nodes of a tree, and a state is the modelled memory plus one node for each actor.
#ifndef RESIDENCY_TESTS_USE_WORD_MODEL_H_
#define RESIDENCY_TESTS_USE_WORD_MODEL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "mechanisms/use_word.h"

namespace residency {

enum ActorId : uint8_t { kUserA, kUserB, kReader, kDaemon, kActors };
inline constexpr const char* kActorNames[] = {"user A", "user B", "reader", "daemon"};

// Packets: a kind and the generation that it is about.
enum PacketKind : uint16_t { kRevoke = 0x100, kGrant = 0x200, kReleased = 0x300, kMapped = 0x400 };
constexpr uint16_t Kind(uint64_t packet) { return packet & 0xff00; }
constexpr uint16_t Generation(uint64_t packet) { return packet & 0xff; }
// What the reader's poll answers when the eventfd is readable, and when the daemon has hung up.
inline constexpr uint64_t kWakeUp = 1, kHangUp = 2;

struct Queue {
  std::array<uint16_t, 7> packets;
  uint16_t length;
};

// The shared world; compared byte by byte, so it has no padding.
struct World {
  uint64_t word;
  uint32_t sequence;
  uint32_t stop;
  uint32_t node[kActors];  // where each actor is in its history
  Queue to_reader;
  Queue to_daemon;
  uint32_t sleepers;  // bit per actor: asleep in the futex
  uint8_t event;      // the reader's eventfd is readable
  uint8_t mapped;     // the generation that the client has mapped, 0 for none
  uint8_t elsewhere;  // the daemon has given the cells to somebody else
  uint8_t hung_up;    // 1: the daemon is dead, 2: and the reader knows

  bool operator==(const World& other) const { return memcmp(this, &other, sizeof(*this)) == 0; }
};
static_assert(std::has_unique_object_representations_v<World>);

enum class OpKind : uint8_t {
  kLoad,
  kStore,
  kAdd,
  kSub,
  kOr,
  kAnd,
  kCas,  // on a cell of memory
  kSleepIf,
  kSleep,
  kWakeSleepers,
  kWakeReader,  // the futex and the eventfd
  kPoll,
  kDrain,
  kReceive,
  kSendReader,
  kSendDaemon,
  kChoose,  // packets and chance
  kMap,
  kUnmap,
  kTakeCells,
  kReturnCells,  // the cells
};
inline constexpr const char* kOpNames[] = {
    "load",           "store",          "add",           "sub",         "or",    "and",        "cas",
    "sleep-if",       "sleep",          "wake sleepers", "wake reader", "poll",  "drain",      "receive",
    "send to reader", "send to daemon", "choose",        "map",         "unmap", "take cells", "return cells"};
enum Cell : uint8_t { kWord, kSequence, kStop };

struct Op {
  OpKind kind;
  Cell cell = kWord;
  uint64_t argument = 0;
  uint64_t expected = 0;  // kCas
  uint32_t site = 0;      // where in the code under test: line and column

  bool operator==(const Op&) const = default;
};

using Site = std::source_location;
inline uint32_t Pack(const Site& site) { return site.line() * 256 + site.column(); }

// Thrown by an operation that has no result yet.
struct Suspended {};

// One run of an actor against the results that it had so far.
class Replay {
 public:
  explicit Replay(const std::vector<uint64_t>& results) : results_(results) {}

  uint64_t Do(Op op) {
    if (position_ == results_.size()) {
      pending_ = op;
      throw Suspended{};
    }
    if (leaves_with_next_op_) inside_ = leaves_with_next_op_ = false;
    if (op.kind == OpKind::kLoad && op.cell == kSequence) sequence_ = results_[position_];
    return results_[position_++];
  }

  // The actor may touch the cells from now on, until the operation after LeavesWithNextOp has been done.
  void SetInside() { inside_ = true; }
  void LeavesWithNextOp() { leaves_with_next_op_ = true; }

  const Op& pending() const { return pending_; }
  bool inside() const { return inside_; }
  // What a user in Enter has to remember, beside where in the code it is: the sequence that it has read.
  uint64_t remembers() const { return pending_.kind == OpKind::kLoad && pending_.cell != kSequence ? sequence_ : 0; }

 private:
  const std::vector<uint64_t>& results_;
  size_t position_ = 0;
  uint64_t sequence_ = ~uint64_t{0};
  bool inside_ = false;
  bool leaves_with_next_op_ = false;
  Op pending_{OpKind::kLoad};
};

// The Memory of BasicUseWord: every operation is a step of the model.
template <typename T>
class ModelAtomic {
 public:
  ModelAtomic(Replay* replay, Cell cell) : replay_(replay), cell_(cell) {}
  T load(std::memory_order, Site site = Site::current()) { return Do(OpKind::kLoad, 0, 0, site); }
  void store(T value, std::memory_order, Site site = Site::current()) { Do(OpKind::kStore, value, 0, site); }
  T fetch_add(T value, std::memory_order, Site site = Site::current()) { return Do(OpKind::kAdd, value, 0, site); }
  T fetch_sub(T value, std::memory_order, Site site = Site::current()) { return Do(OpKind::kSub, value, 0, site); }
  T fetch_or(T value, std::memory_order, Site site = Site::current()) { return Do(OpKind::kOr, value, 0, site); }
  T fetch_and(T value, std::memory_order, Site site = Site::current()) { return Do(OpKind::kAnd, value, 0, site); }
  bool compare_exchange_strong(T& expected, T desired, std::memory_order, std::memory_order,
                               Site site = Site::current()) {
    const T before = Do(OpKind::kCas, desired, expected, site);
    return before == expected || (expected = before, false);
  }

 private:
  T Do(OpKind kind, uint64_t argument, uint64_t expected, const Site& site) {
    return replay_->Do({kind, cell_, argument, expected, Pack(site)});
  }

  Replay* replay_;
  Cell cell_;
};

class ModelMemory {
 public:
  explicit ModelMemory(Replay* replay) : replay_(replay) {}
  ModelAtomic<uint64_t> word() { return {replay_, kWord}; }
  ModelAtomic<uint32_t> sequence() { return {replay_, kSequence}; }
  ModelAtomic<uint32_t> stop() { return {replay_, kStop}; }
  bool WaitSequence(uint32_t seen, absl::Time, Site site = Site::current()) {
    if (replay_->Do({OpKind::kSleepIf, kSequence, seen, 0, Pack(site)}) == 0) return true;
    return replay_->Do({OpKind::kSleep, kSequence, 0, 0, Pack(site)}) != 0;
  }
  void WakeSequence() { replay_->Do({OpKind::kWakeSleepers}); }
  void WakeReader(Site site = Site::current()) { replay_->Do({OpKind::kWakeReader, kWord, 0, 0, Pack(site)}); }

 private:
  Replay* replay_;
};

// Where an actor is: the operation that it asks for after a certain history.
struct Node {
  ActorId actor;
  int phase;
  std::vector<uint64_t> results;  // within this phase
  bool done = false;
  bool inside = false;
  uint64_t remembers = 0;
  Op pending{OpKind::kLoad};
  std::map<uint64_t, uint32_t> next = {};  // by the result of `pending`
};

// Runs one piece of an actor's work, from the start of it; returns the next phase, or kDone.
inline constexpr int kDone = -1;
using Piece = std::function<int(ActorId, int phase, Replay&)>;

// The histories of all actors. A user that waits goes round a loop and its history grows, though all that it remembers
// is the sequence it read. Such histories are merged where the user stands at the same place in the code with the same
// memory; CheckMerges then holds the code to it, so that a user which remembers more is noticed.
class Histories {
 public:
  explicit Histories(Piece piece) : piece_(std::move(piece)) {}

  const Node& node(uint32_t id) const { return nodes_[id]; }

  uint32_t Start(ActorId actor, int phase) {
    const auto found = starts_.find({actor, phase});
    if (found != starts_.end()) return found->second;
    const uint32_t id = Make(Node{actor, phase, {}});
    starts_[{actor, phase}] = id;
    return id;
  }

  uint32_t Next(uint32_t id, uint64_t result) {
    const auto found = nodes_[id].next.find(result);
    if (found != nodes_[id].next.end()) return found->second;
    Node node{nodes_[id].actor, nodes_[id].phase, nodes_[id].results};
    node.results.push_back(result);
    const uint32_t next = Make(std::move(node));
    nodes_[id].next[result] = next;
    return next;
  }

  // Whether merged histories go on alike, through every continuation of kMergeDepth operations that the search met.
  bool CheckMerges() {
    for (const auto& [results, id] : merges_) {
      if (!GoesOnAlike(results, id, kMergeDepth)) return false;
    }
    return true;
  }

 private:
  static constexpr int kMergeDepth = 6;
  using Place = std::tuple<ActorId, int, bool, uint64_t, OpKind, Cell, uint64_t, uint64_t, uint32_t>;

  // Runs `node` from its start to the operation after its results; the phase where it comes to the end of its piece.
  std::optional<int> RunTo(Node& node) {
    Replay replay(node.results);
    try {
      return piece_(node.actor, node.phase, replay);
    } catch (const Suspended&) {
      node.pending = replay.pending();
      node.inside = replay.inside();
      node.remembers = replay.remembers();
      return std::nullopt;
    }
  }

  uint32_t Make(Node node) {
    node.done = node.phase == kDone;
    if (!node.done) {
      if (const std::optional<int> next = RunTo(node)) return Start(node.actor, *next);
      if ((node.actor == kUserA || node.actor == kUserB) && !node.inside) {
        const Op& op = node.pending;
        const Place place{node.actor, node.phase,  node.inside, node.remembers, op.kind,
                          op.cell,    op.argument, op.expected, op.site};
        const auto [entry, is_new] = places_.try_emplace(place, nodes_.size());
        if (!is_new) {
          merges_.emplace_back(std::move(node.results), entry->second);
          return entry->second;
        }
      }
    }
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
  }

  bool GoesOnAlike(const std::vector<uint64_t>& results, uint32_t id, int depth) {
    const Node& node = nodes_[id];
    Node other{node.actor, node.phase, results};
    if (RunTo(other).has_value() || other.pending != node.pending || other.inside != node.inside) return false;
    if (depth == 0) return true;
    for (const auto& [result, next] : node.next) {
      // A piece that ends is compared by the phase that it ends in.
      if (nodes_[next].phase != node.phase) {
        Node end{node.actor, node.phase, results};
        end.results.push_back(result);
        const std::optional<int> phase = RunTo(end);
        if (!phase.has_value() || Start(node.actor, *phase) != next) return false;
        continue;
      }
      std::vector<uint64_t> longer = results;
      longer.push_back(result);
      if (!GoesOnAlike(longer, next, depth - 1)) return false;
    }
    return true;
  }

  Piece piece_;
  std::deque<Node> nodes_;
  std::map<std::pair<ActorId, int>, uint32_t> starts_;
  std::map<Place, uint32_t> places_;
  std::vector<std::pair<std::vector<uint64_t>, uint32_t>> merges_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_USE_WORD_MODEL_H_
