// SPDX-License-Identifier: Apache-2.0
#include "tests/walk.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr size_t kMostClients = 5;
constexpr uint64_t kStepsPerFullCompare = 512;
// Two or three of the models fit beside each other, and none of the larger ones with all.
constexpr uint64_t kBudgetBytes = 12 * kMiB;
constexpr uint64_t kPieceBytes = kMiB / 4;

constexpr const char* kNames[] = {"one", "two", "mix", "parts", "phases"};

// Shared by all walks of the process, since making them takes longer than a walk.
std::vector<RigCheckpoint*> Checkpoints() {
  static RigCheckpoint one("one", {2 * kMiB - 64}, 2 * kMiB, 1);
  static RigCheckpoint two("two", {3 * kMiB}, 2 * kMiB, 2);
  static RigCheckpoint mix("mix", {5 * kMiB}, 4 * kMiB, 3);
  static RigCheckpoint parts("parts", {2 * kMiB, 4 * kMiB, 1}, 2 * kMiB, 4);
  static RigCheckpoint phases("phases", {3 * kMiB, 4 * kMiB, 1}, 2 * kMiB, 5, ModelMode::kPhased);
  return {&one, &two, &mix, &parts, &phases};
}

// The calls that a transition makes, and the silent one.
constexpr DriverCall kFaulty[] = {k_cuMemCreate,         k_cuMemMap,
                                  k_cuMemSetAccess,      k_cuMemUnmap,
                                  k_cuMemcpyHtoDAsync,   k_cuMemcpyDtoHAsync,
                                  k_cuMemsetD8Async,     k_cuLaunchKernel,
                                  k_cuStreamSynchronize, k_cuMemExportToShareableHandle,
                                  k_cuMemGetInfo,        k_cuMemRetainAllocationHandle,
                                  k_cuMemRelease,        k_cuMemAddressReserve,
                                  k_cuStreamCreate,      k_cuCtxGetCurrent,
                                  kFlippedCopy};

bool IsReleasing(const CoreRig::Client& client) {
  return std::any_of(client.leases.begin(), client.leases.end(),
                     [](const auto& entry) { return entry.second.releasing; });
}

}  // namespace

WalkCounts& WalkCounts::operator+=(const WalkCounts& other) {
  steps += other.steps;
  events += other.events;
  answers += other.answers;
  realized += other.realized;
  mapped += other.mapped;
  uses += other.uses;
  deaths += other.deaths;
  faults += other.faults;
  broken += other.broken;
  phases += other.phases;
  early_cells += other.early_cells;
  hindered += other.hindered;
  early += other.early;
  readings_failed += other.readings_failed;
  return *this;
}

Walk::Walk(uint64_t seed) : random_(seed), rig_(kBudgetBytes, Checkpoints(), kPieceBytes) {
  rig_.ReadEarly();
  for (const char* name : kNames) rig_.Register(name);
}

std::string Walk::Run(uint64_t steps) {
  for (uint64_t step = 0; step < steps; ++step) {
    ++counts_.steps;
    Act();
    if (std::string wrong = Check(step % kStepsPerFullCompare == 0); !wrong.empty()) return wrong;
  }
  std::string wrong = Finish();
  counts_.events = rig_.events();
  counts_.answers = rig_.answered();
  counts_.realized = rig_.realized();
  counts_.early = rig_.realized_early();
  counts_.readings_failed = rig_.readings_failed();
  counts_.mapped = rig_.mapped_by_clients();
  counts_.early_cells = rig_.early_cells();
  counts_.hindered = rig_.hindered();
  counts_.faults = FaultDriver::hits();
  return wrong;
}

std::string Walk::Check(bool all_bytes) {
  std::string wrong = rig_.CheckOwners();
  return wrong.empty() ? rig_.CheckBytes(all_bytes, random_()) : wrong;
}

void Walk::Act() {
  const uint64_t draw = Draw(100);
  if (draw < 58) return LetHappen();
  if (draw < 76) return MoveClients();
  if (draw < 98) return Ask();
  Inject();
}

const char* Walk::AnyModel() { return kNames[Draw(std::size(kNames))]; }

SessionId Walk::AnyClient(bool with_lease) {
  std::vector<SessionId> some;
  for (const auto& [session, client] : rig_.clients()) {
    if (!client.dead && (!with_lease || !client.leases.empty())) some.push_back(session);
  }
  return some.empty() ? SessionId{} : some[Draw(some.size())];
}

LeaseId Walk::AnyLease(SessionId session) {
  const auto& leases = rig_.clients().at(session).leases;
  return std::next(leases.begin(), static_cast<int64_t>(Draw(leases.size())))->first;
}

// What is under way goes on by one piece, in any order that the daemon's threads and sockets could take.
void Walk::LetHappen() {
  const uint64_t draw = Draw(8);
  if (draw < 2 && rig_.WorkDevice()) return;
  if (draw < 4 && rig_.DeliverAnswer()) return;
  if (draw == 4 && rig_.WorkLoader()) return;
  if (draw == 5 && Chance(4)) {
    // Mostly little, seldom to the next timer; a drain takes seconds and the pool is kept for ten.
    rig_.Advance(Chance(8) ? absl::Seconds(20) : absl::Milliseconds(static_cast<int64_t>(Draw(500))));
    return;
  }
  std::vector<SessionId> sessions;
  for (const auto& [session, client] : rig_.clients()) {
    if (!client.inbox.empty() || !client.outbox.empty() || IsReleasing(client)) sessions.push_back(session);
  }
  if (!sessions.empty()) {
    const SessionId session = sessions[Draw(sessions.size())];
    if (IsReleasing(rig_.clients().at(session)) && Chance(4)) return rig_.Pause(session, true);
    if (Chance(3) && rig_.WorkClient(session)) return;
    if (Chance(2) ? rig_.DeliverPacket(session) : rig_.DeliverEvent(session)) return;
  }
  (void)(rig_.DeliverAnswer() || rig_.WorkDevice());
}

void Walk::MoveClients() {
  const uint64_t draw = Draw(40);
  if (draw == 0 || rig_.clients().empty()) {
    if (rig_.clients().size() < kMostClients) rig_.Connect();
    return;
  }
  if (draw == 1 && Chance(2)) {
    if (const SessionId session = AnyClient(false)) {
      rig_.Kill(session, /*heard=*/Chance(2));
      ++counts_.deaths;
    }
    return;
  }
  if (draw == 2 && Chance(3)) {
    if (const SessionId session = AnyClient(false)) rig_.HangUp(session);
    return;
  }
  if (draw == 3) {
    if (const SessionId session = AnyClient(false)) rig_.FailNextMapping(session);
    return;
  }
  if (draw >= 4 && draw < 8) {
    if (const SessionId session = AnyClient(false)) rig_.Pause(session, draw == 4 && Chance(2));
    return;
  }
  const SessionId session = AnyClient(true);
  if (!session || rig_.clients().at(session).paused) return;
  const LeaseId lease = AnyLease(session);
  const int uses = rig_.clients().at(session).leases.at(lease).uses;
  if (uses > 0 && !Chance(3)) return rig_.Leave(session, lease);
  if (rig_.Enter(session, lease)) ++counts_.uses;
}

// One of the leases of phased models goes from phase to phase.
void Walk::MovePhases() {
  std::vector<std::pair<SessionId, LeaseId>> some;
  for (const auto& [session, client] : rig_.clients()) {
    for (const auto& [id, lease] : client.leases) {
      if (!client.dead && lease.checkpoint->mode() == ModelMode::kPhased) some.emplace_back(session, id);
    }
  }
  if (some.empty()) return;
  const auto [session, lease] = some[Draw(some.size())];
  // Late, or of nobody, or of another's model.
  if (Chance(6)) {
    if (const SessionId other = AnyClient(true)) rig_.EndPhase(other, AnyLease(other), PhaseId{Draw(4)});
    return;
  }
  const auto record = rig_.arbiter().records().leases.find(lease);
  if (record != rig_.arbiter().records().leases.end() && record->second.phase && Chance(2)) {
    rig_.EndPhase(session, lease, record->second.phase);
    return;
  }
  const absl::Duration deadline =
      Chance(2) ? absl::Milliseconds(static_cast<int64_t>(Draw(3000)) + 1) : absl::InfiniteDuration();
  rig_.BeginPhase(session, lease, absl::StrCat("part", Draw(3)), deadline);
  ++counts_.phases;
}

void Walk::Ask() {
  if (Chance(4)) return MovePhases();
  const uint64_t draw = Draw(100);
  if (draw < 50) {
    const SessionId session = Chance(4) ? SessionId{} : AnyClient(false);
    // A client that has closed its channel does not call any more, or its call came before.
    const absl::Duration deadline =
        Chance(3) ? absl::Milliseconds(static_cast<int64_t>(Draw(3000)) + 1) : absl::InfiniteDuration();
    rig_.Activate(AnyModel(), session, deadline);
  } else if (draw < 65) {
    rig_.Deactivate(AnyModel(), Chance(2) ? absl::ZeroDuration() : absl::Seconds(3));
  } else if (draw < 72) {
    rig_.Verify(AnyModel());
  } else if (draw < 82) {
    if (const SessionId session = AnyClient(true)) rig_.ReleaseLease(session, AnyLease(session));
  } else if (draw < 92) {
    const std::vector<RequestId> outstanding = rig_.outstanding();
    if (!outstanding.empty()) rig_.Cancel(outstanding[Draw(outstanding.size())]);
  } else if (draw < 95) {
    rig_.Unload(AnyModel());
  } else if (draw < 96) {
    rig_.AskToTrim();
  } else {
    rig_.Register(AnyModel());
  }
}

void Walk::Inject() {
  if (Chance(3)) return FaultDriver::Disarm();
  if (Chance(8)) return rig_.FailNextReading();
  const DriverCall call = kFaulty[Draw(std::size(kFaulty))];
  const uint64_t first = FaultDriver::calls(call) + 1 + Draw(12);
  const uint64_t last = Chance(5) ? first + 1 + Draw(40) : first;
  FaultDriver::Arm({call, first, last, FittingError(call)});
}

// Nobody holds anything back any more: every request gets its answer, and everything can be given back.
std::string Walk::Finish() {
  FaultDriver::Disarm();
  for (const auto& [session, client] : rig_.clients()) {
    if (client.dead) continue;
    rig_.Pause(session, false);
    for (const auto& [id, lease] : client.leases) {
      while (lease.uses > 0) rig_.Leave(session, id);
    }
  }
  for (int round = 0; round < 1000; ++round) {
    rig_.Drain();
    if (!rig_.Advance(absl::Hours(1))) break;
  }
  if (std::string wrong = Check(/*all_bytes=*/true); !wrong.empty()) return wrong;
  std::vector<SessionId> sessions;
  for (const auto& [session, client] : rig_.clients()) sessions.push_back(session);
  for (SessionId session : sessions) rig_.Kill(session);
  rig_.Drain();
  if (!rig_.outstanding().empty()) {
    return absl::StrCat("request ", rig_.outstanding().front().value, " was never answered");
  }
  std::vector<std::string> names;
  for (const auto& [id, model] : rig_.arbiter().records().models) {
    names.push_back(model.name);
    if (model.state == ModelState::kBroken) ++counts_.broken;
  }
  for (const std::string& name : names) {
    const RequestId request = rig_.Unload(name);
    rig_.Drain();
    const Reply* reply = rig_.reply(request);
    if (reply == nullptr || !reply->status.ok()) {
      return absl::StrCat(name, " cannot be unloaded: ", reply == nullptr ? "no reply" : reply->status.ToString());
    }
  }
  std::string wrong = Check(/*all_bytes=*/true);
  return wrong.empty() ? rig_.CheckEmpty() : wrong;
}

}  // namespace residency
