// SPDX-License-Identifier: Apache-2.0
//
// The core on phased models: what a claim is worth, whose phase it is, and who waits.
#include <catch2/catch.hpp>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kTextBytes = 6 * kMiB;
constexpr uint64_t kTransformerBytes = 16 * kMiB;
constexpr uint64_t kVaeBytes = 2 * kMiB;

// A phased model that is active, and two sessions with a lease each.
struct PhasedRig : ArbiterRig {
  explicit PhasedRig(uint64_t total_bytes = 20 * kMiB) : ArbiterRig(total_bytes) {
    model_id = RegisterPhased("flux", {{"text", kTextBytes}, {"transformer", kTransformerBytes}, {"vae", kVaeBytes}});
    for (uint64_t number : {1, 2}) {
      sessions.push_back(Open(number));
      Activate("flux", sessions.back());
      if (number == 1) {
        Measured();
        Realized(model_id);
      }
      leases.push_back(Take<GrantLease>().at(0).lease);
      activations.push_back(OnlyReply());
      effects.clear();
    }
  }
  RequestId Begin(size_t who, const std::string& component, absl::Time deadline = absl::InfiniteFuture()) {
    return BeginPhase(sessions[who], leases[who], component, deadline);
  }
  // The beginning of a phase with nothing in the way, to the mapped cells.
  PhaseOutcome Enter(size_t who, const std::string& component) {
    Begin(who, component);
    LetGo();
    RealizeAll();
    return Entered();
  }
  void RealizeAll() {
    while (Has<RealizePlan>()) Realized(model_id);
  }
  // The lease that is being asked back lets go.
  void LetGo() {
    if (!Has<CloseUseWords>()) return;
    Take<CloseUseWords>();
    Feed(UseWordsClosed{model_id, {}});
    for (const RevokeLease& revoke : Take<RevokeLease>()) Feed(LeaseReleased{revoke.lease, revoke.generation});
  }
  PhaseOutcome Entered() {
    const Reply reply = OnlyReply();
    if (!reply.status.ok()) throw std::runtime_error(reply.status.ToString());
    for (const SendCells& send : Take<SendCells>()) Feed(LeaseMapped{send.lease, send.generation});
    return std::get<PhaseOutcome>(reply.outcome);
  }
  const ModelRecord& flux() const { return model(model_id); }

  ModelId model_id;
  std::vector<SessionId> sessions;
  std::vector<LeaseId> leases;
  std::vector<Reply> activations;
};

TEST_CASE("Activating a phased model claims its largest component and moves nothing") {
  PhasedRig rig;
  for (const Reply& reply : rig.activations) {
    REQUIRE(reply.status.ok());
    CHECK(std::get<ActivateOutcome>(reply.outcome).bytes_moved == 0);
    CHECK(std::get<ActivateOutcome>(reply.outcome).generation == 0);
  }
  CHECK(rig.flux().state == ModelState::kActive);
  CHECK(rig.flux().claimed_device_bytes == kTransformerBytes);
  CHECK(rig.flux().device_bytes == 0);
}

TEST_CASE("A model of 24 MiB goes by phases through 20 MiB, and each phase moves its component once") {
  PhasedRig rig;
  uint64_t moved_bytes = 0;
  for (const char* component : {"text", "transformer", "vae"}) {
    const PhaseOutcome begun = rig.Enter(0, component);
    CHECK(begun.device_bytes == begun.bytes_moved);
    moved_bytes += begun.bytes_moved;
    // The same again is there already.
    CHECK(rig.Enter(0, component).bytes_moved == 0);
  }
  CHECK(moved_bytes == kTextBytes + kTransformerBytes + kVaeBytes);
}

TEST_CASE("A phased model that cannot fit its largest component is refused with both figures") {
  ArbiterRig rig(14 * kMiB);
  rig.RegisterPhased("flux", {{"text", kTextBytes}, {"transformer", kTransformerBytes}});
  rig.Activate("flux");
  rig.Measured();
  const auto refusal = GetRefusal(rig.OnlyReply().status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "GPU_BUDGET");
  CHECK(refusal->needed_bytes == kTransformerBytes);
  CHECK(refusal->available_bytes == 14 * kMiB);
}

TEST_CASE("Room that is promised to a phase is nobody else's, and its owner gives no way between phases") {
  PhasedRig rig;
  rig.Register("other", 6 * kMiB);
  for (const bool in_phase : {false, true}) {
    if (in_phase) rig.Enter(0, "vae");
    rig.effects.clear();
    rig.Activate("other");
    rig.Measured();
    const auto refusal = GetRefusal(rig.OnlyReply().status);
    REQUIRE(refusal.has_value());
    CHECK(refusal->reason == "IN_USE");
    CHECK(refusal->needed_bytes == 6 * kMiB);
    CHECK(refusal->available_bytes == 4 * kMiB);
    CHECK(refusal->holders.size() == 2);
  }
}

TEST_CASE("A claim that nobody has a lease on gives way") {
  ArbiterRig rig(20 * kMiB);
  const ModelId flux = rig.RegisterPhased("flux", {{"text", kTextBytes}, {"transformer", kTransformerBytes}});
  const ModelId other = rig.Register("other", 6 * kMiB);
  rig.BringOn("flux", flux);
  rig.effects.clear();
  rig.Activate("other");
  rig.Measured();
  rig.Realized(other);
  CHECK(rig.model(flux).state == ModelState::kInactive);
  CHECK(std::get<ActivateOutcome>(rig.OnlyReply().outcome).evicted == std::vector<std::string>{"flux"});
}

TEST_CASE("Two leases share a component, which leaves with the last of them") {
  PhasedRig rig;
  const PhaseOutcome first = rig.Enter(0, "text");
  const PhaseOutcome second = rig.Enter(1, "text");
  CHECK(first.bytes_moved == kTextBytes);
  CHECK(second.bytes_moved == 0);
  CHECK(second.phase != first.phase);
  rig.EndPhase(rig.sessions[0], rig.leases[0], first.phase);
  rig.LetGo();
  CHECK(rig.OnlyReply().status.ok());
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.EndPhase(rig.sessions[1], rig.leases[1], second.phase);
  rig.LetGo();
  rig.Realized(rig.model_id);
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.flux().device_bytes == 0);
  CHECK(rig.flux().state == ModelState::kActive);
}

TEST_CASE("A lease that wants another component waits for those in the phase that is on") {
  PhasedRig rig;
  const PhaseOutcome first = rig.Enter(0, "text");
  rig.effects.clear();
  rig.Begin(1, "vae");
  CHECK(rig.effects.empty());
  // Requests about the device go on meanwhile.
  rig.Activate("flux");
  CHECK(rig.OnlyReply().status.ok());
  rig.effects.clear();
  SECTION("until they leave it") {
    rig.EndPhase(rig.sessions[0], rig.leases[0], first.phase);
    rig.LetGo();
    rig.Realized(rig.model_id);
    CHECK(rig.OnlyReply().status.ok());
    rig.Realized(rig.model_id);
  }
  SECTION("until they begin another one, for which they wait in their turn") {
    rig.Begin(0, "transformer");
    rig.LetGo();
    rig.RealizeAll();
    CHECK(rig.Entered().bytes_moved == kVaeBytes);
    CHECK_FALSE(rig.Has<RealizePlan>());
    rig.Feed(SessionEnded{rig.sessions[1]});
    rig.RealizeAll();
  }
  SECTION("until their process is gone") {
    rig.Feed(SessionHungUp{rig.sessions[0]});
    CHECK_FALSE(rig.Has<RealizePlan>());
    rig.Feed(SessionEnded{rig.sessions[0]});
    rig.RealizeAll();
  }
  const PhaseOutcome begun = rig.Entered();
  CHECK(begun.bytes_moved == begun.device_bytes);
  CHECK(begun.bytes_moved > 0);
}

TEST_CASE("The wait for a phase ends with its deadline, its caller, its lease and its model") {
  PhasedRig rig;
  rig.Enter(0, "text");
  rig.effects.clear();
  const RequestId waiting = rig.Begin(1, "vae", rig.now() + absl::Seconds(1));
  const auto timers = rig.Take<SetTimer>();
  REQUIRE(timers.size() == 1);
  SECTION("its deadline") {
    rig.Feed(TimerFired{timers[0].timer});
    CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kDeadlineExceeded);
  }
  SECTION("its caller") {
    rig.Feed(RequestCancelled{waiting});
    CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kCancelled);
  }
  SECTION("its lease") {
    rig.Feed(SessionEnded{rig.sessions[1]});
    CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_LEASE");
  }
  SECTION("its model's deactivation") {
    rig.Deactivate("flux");
    rig.LetGo();
    rig.Realized(rig.model_id);
    const auto replies = rig.Take<Reply>();
    REQUIRE(replies.size() == 2);
    CHECK(replies[0].status.ok());
    CHECK(replies[1].request == waiting);
    CHECK(ReasonOf(replies[1].status) == "NOT_ACTIVE");
  }
  // What the other one is in stays, where its model does.
  if (rig.flux().state == ModelState::kActive) CHECK(rig.flux().device_bytes == kTextBytes);
}

TEST_CASE("A component that all have left goes also when the phase that was to replace it never begins") {
  PhasedRig rig;
  rig.Enter(0, "text");
  rig.Begin(1, "vae");
  rig.Activate("flux");  // something runs while the process ends
  rig.effects.clear();
  const ModelId other = rig.Register("other", 2 * kMiB);
  rig.Activate("other");
  rig.Feed(SessionEnded{rig.sessions[0]});
  rig.Feed(SessionEnded{rig.sessions[1]});
  rig.Measured();
  rig.Realized(other);
  while (rig.Has<RealizePlan>()) rig.Realized(rig.model_id);
  CHECK(rig.flux().device_bytes == 0);
}

TEST_CASE("A phase that is in use is not left, and goes on") {
  PhasedRig rig;
  const PhaseOutcome begun = rig.Enter(0, "text");
  const bool by_another = GENERATE(false, true);
  if (by_another) {
    rig.Begin(0, "vae");
  } else {
    rig.EndPhase(rig.sessions[0], rig.leases[0], begun.phase);
  }
  rig.Feed(UseWordsClosed{rig.model_id, {rig.leases[0]}});
  rig.Feed(UseWordsReopened{rig.model_id, {}});
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.effects.clear();
  CHECK(rig.Enter(0, "text").phase == begun.phase);
}

TEST_CASE("An end that comes late, after another phase or a deactivation, ends nothing") {
  PhasedRig rig;
  const PhaseOutcome text = rig.Enter(0, "text");
  rig.Enter(0, "vae");
  rig.effects.clear();
  rig.EndPhase(rig.sessions[0], rig.leases[0], text.phase);
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.flux().device_bytes == kVaeBytes);
  CHECK(rig.effects.empty());
}

TEST_CASE("A deactivation ends the phases, and an activation brings none of them back") {
  PhasedRig rig;
  rig.Enter(0, "text");
  rig.effects.clear();
  rig.Deactivate("flux");
  rig.LetGo();
  rig.Realized(rig.model_id);
  const Reply reply = rig.OnlyReply();
  CHECK(std::get<DeactivateOutcome>(reply.outcome).pooled_bytes == kTextBytes);
  rig.Begin(0, "vae");
  CHECK(ReasonOf(rig.OnlyReply().status) == "NOT_ACTIVE");
  rig.effects.clear();
  rig.Activate("flux");
  rig.Measured();
  rig.Realized(rig.model_id);
  CHECK(std::get<ActivateOutcome>(rig.OnlyReply().outcome).bytes_moved == 0);
  CHECK_FALSE(rig.Has<SendCells>());
  CHECK(rig.Enter(0, "vae").bytes_moved == kVaeBytes);
}

TEST_CASE("A component that could not be brought on leaves nothing of itself, and the next phase begins") {
  PhasedRig rig;
  rig.Enter(0, "text");
  rig.Begin(0, "vae");
  rig.LetGo();
  // The one before is taken off by itself, so that nothing brings it back.
  rig.Realized(rig.model_id);
  CHECK(rig.flux().device_bytes == 0);
  CHECK(rig.Take<RealizePlan>().size() == 1);
  rig.Feed(PlanRealized{.model = rig.model_id,
                        .status = Refuse(absl::StatusCode::kResourceExhausted, "GPU_MEMORY", "others were faster")});
  CHECK(ReasonOf(rig.OnlyReply().status) == "GPU_MEMORY");
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.flux().device_bytes == 0);
  // Its client may have been sent cells of it.
  const RevokeLease revoked = rig.Take<RevokeLease>().at(0);
  rig.Feed(LeaseReleased{revoked.lease, revoked.generation});
  rig.effects.clear();
  CHECK(rig.Enter(0, "vae").bytes_moved == kVaeBytes);
}

TEST_CASE("A client that hangs up while its component is filled enters no phase") {
  PhasedRig rig;
  rig.Begin(0, "vae");
  rig.Take<RealizePlan>();
  rig.Feed(SessionHungUp{rig.sessions[0]});
  rig.Feed(PlanRealized{.model = rig.model_id, .device_bytes = kVaeBytes, .copied_bytes = kVaeBytes});
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_LEASE");
  CHECK_FALSE(rig.arbiter().records().IsInPhase(rig.model_id));
}

TEST_CASE("A client that cannot map its component while it is filled is told why, and nobody fills on for it") {
  PhasedRig rig;
  rig.Begin(0, "vae");
  const LeaseId lease = rig.Take<RealizePlan>().at(0).readers.at(0).lease;
  rig.Feed(LeaseFailed{lease, Refuse(absl::StatusCode::kAborted, "GPU_MEMORY", "no room for a context"), true});
  CHECK(ReasonOf(rig.OnlyReply().status) == "GPU_MEMORY");
  CHECK(rig.Take<EndLease>().at(0).lease == lease);
  CHECK(rig.Take<CancelRealize>().size() == 1);
  rig.Feed(PlanRealized{.model = rig.model_id, .status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "stopped")});
  CHECK(rig.flux().state == ModelState::kActive);
  CHECK_FALSE(rig.Has<Reply>());
}

TEST_CASE("A component that could not be taken off is taken off when its phase is ended again") {
  PhasedRig rig;
  const PhaseOutcome begun = rig.Enter(0, "text");
  rig.EndPhase(rig.sessions[0], rig.leases[0], begun.phase);
  rig.LetGo();
  rig.Take<RealizePlan>();
  rig.Feed(PlanRealized{.model = rig.model_id,
                        .status = Refuse(absl::StatusCode::kInternal, "DRIVER", "cuMemUnmap"),
                        .device_bytes = kTextBytes});
  CHECK(ReasonOf(rig.OnlyReply().status) == "DRIVER");
  rig.EndPhase(rig.sessions[0], rig.leases[0], begun.phase);
  rig.Realized(rig.model_id);
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.flux().device_bytes == 0);
}

TEST_CASE("An end of no phase, or of a held model's, takes nobody's cells") {
  PhasedRig rig;
  rig.Enter(0, "text");
  rig.effects.clear();
  for (const uint64_t phase : {0, 77}) {
    rig.EndPhase(rig.sessions[1], rig.leases[1], PhaseId{phase});
    CHECK(rig.OnlyReply().status.ok());
    CHECK(rig.effects.empty());
  }
  ArbiterRig held(20 * kMiB);
  const ModelId model = held.Register("held", 2 * kMiB);
  const SessionId session = held.Open(1);
  held.BringOn("held", model, session);
  const LeaseId lease = held.Mapped();
  held.effects.clear();
  held.EndPhase(session, lease, PhaseId{});
  CHECK(held.OnlyReply().status.ok());
  CHECK(held.effects.empty());
}

TEST_CASE("The end of one lease may be what lets another one of the same session go with its model") {
  PhasedRig rig;
  rig.Enter(0, "text");
  const ModelId other = rig.Register("other", 2 * kMiB);
  rig.Activate("other", rig.sessions[0]);
  // The session's second lease is newer, its model is unloaded behind the phase that waits for the first one.
  rig.Measured();
  rig.Realized(other);
  rig.Begin(0, "vae");
  rig.Feed(UseWordsClosed{rig.model_id, {}});
  rig.Feed(UnloadRequested{rig.NextRequest(), "other"});
  rig.effects.clear();
  rig.Feed(SessionEnded{rig.sessions[0]});
  CHECK(rig.arbiter().records().leases.size() == 1);
}

TEST_CASE("A phase whose caller gives up is stopped and taken off, unless another one wants the same") {
  PhasedRig rig;
  const RequestId request = rig.Begin(0, "transformer");
  rig.Take<RealizePlan>();
  const bool wanted = GENERATE(false, true);
  if (wanted) rig.Begin(1, "transformer");
  rig.effects.clear();
  rig.Feed(RequestCancelled{request});
  CHECK(rig.Take<Reply>().at(0).status.code() == absl::StatusCode::kCancelled);
  CHECK(rig.Take<CancelRealize>().size() == (wanted ? 0 : 1));
  if (wanted) {
    rig.Feed(PlanRealized{.model = rig.model_id, .device_bytes = kTransformerBytes, .copied_bytes = kTransformerBytes});
    // Whoever gave up is in no phase, and lets go of what it was sent.
    const RevokeLease revoked = rig.Take<RevokeLease>().at(0);
    rig.Feed(UseWordsClosed{rig.model_id, {}});
    rig.Feed(LeaseReleased{revoked.lease, revoked.generation});
    CHECK(rig.Entered().bytes_moved == 0);
  } else {
    rig.Feed(
        PlanRealized{.model = rig.model_id, .status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "stopped")});
    CHECK(rig.flux().last_error.ok());
    CHECK_FALSE(rig.Has<RealizePlan>());
  }
  CHECK(rig.flux().state == ModelState::kActive);
}

TEST_CASE("A phase is refused by name: a model that is held, a component that is not there, a lease of another's") {
  PhasedRig rig;
  rig.Begin(0, "unet");
  const Reply no_component = rig.OnlyReply();
  CHECK(ReasonOf(no_component.status) == "NO_SUCH_COMPONENT");
  CHECK(no_component.status.message() == "flux has no component 'unet'; there are: text, transformer, vae");
  rig.BeginPhase(rig.sessions[1], rig.leases[0], "text");
  CHECK(ReasonOf(rig.OnlyReply().status) == "SESSION_OWNER");
  rig.BeginPhase(rig.sessions[0], LeaseId{99}, "text");
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_LEASE");

  ArbiterRig held(20 * kMiB);
  const ModelId model = held.Register("held", 2 * kMiB);
  const SessionId session = held.Open(1);
  held.BringOn("held", model, session);
  const LeaseId lease = held.Mapped();
  held.effects.clear();
  held.BeginPhase(session, lease, "model");
  CHECK(ReasonOf(held.OnlyReply().status) == "NOT_PHASED");
}

TEST_CASE("The same files under the same name in the other mode are refused") {
  ArbiterRig rig(20 * kMiB);
  rig.Register("a", 2 * kMiB);
  rig.Feed(RegisterRequested{rig.NextRequest(), "a", "a", DeviceId{1}, Budget{}, ArbiterRig::LayoutOf(2 * kMiB),
                             ModelMode::kPhased});
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.code() == absl::StatusCode::kAlreadyExists);
  CHECK(reply.status.message() == "the name 'a' is registered as held, not as phased; unload it first");
}

}  // namespace
}  // namespace residency
