// SPDX-License-Identifier: Apache-2.0
//
// Drives the decision core with values and keeps its effects, for tests that read like a log.
#ifndef RESIDENCY_TESTS_ARBITER_RIG_H_
#define RESIDENCY_TESTS_ARBITER_RIG_H_

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/arbiter.h"

namespace residency {

class ArbiterRig {
 public:
  // One device of `total_bytes` without a reserve.
  explicit ArbiterRig(uint64_t total_bytes, absl::Duration pool_idle = ArbiterOptions().pool_idle)
      : total_bytes_(total_bytes), arbiter_(Options(total_bytes, pool_idle)) {}

  // Steps, and adds the effects to `effects`.
  void Feed(Event event) {
    for (Effect& effect : arbiter_.Step(event, now_)) effects.push_back(std::move(effect));
  }
  void Advance(absl::Duration by) { now_ += by; }

  // Takes all effects of one kind out of `effects`.
  template <typename Kind>
  std::vector<Kind> Take() {
    std::vector<Kind> taken;
    std::vector<Effect> kept;
    for (Effect& effect : effects) {
      if (auto* match = std::get_if<Kind>(&effect)) {
        taken.push_back(std::move(*match));
      } else {
        kept.push_back(std::move(effect));
      }
    }
    effects = std::move(kept);
    return taken;
  }
  template <typename Kind>
  bool Has() const {
    for (const Effect& effect : effects) {
      if (std::holds_alternative<Kind>(effect)) return true;
    }
    return false;
  }

  // A model of one component and `bytes`, registered and inactive.
  ModelId Register(const std::string& name, uint64_t bytes, const std::string& identity = "") {
    return RegisterLayout(name, LayoutOf(bytes), ModelMode::kHeld, identity);
  }
  // A phased one with these components.
  ModelId RegisterPhased(const std::string& name, const std::vector<std::pair<std::string, uint64_t>>& components) {
    std::vector<LayoutComponent> parts;
    for (const auto& [component, bytes] : components) parts.push_back(ComponentOf(component, bytes));
    return RegisterLayout(name, *MakeLayout(std::move(parts), kMinCellBytes, kMinCellBytes), ModelMode::kPhased);
  }
  ModelId RegisterLayout(const std::string& name, const Layout& layout, ModelMode mode,
                         const std::string& identity = "") {
    Feed(RegisterRequested{RequestId{next_request_++}, name, identity.empty() ? name : identity, DeviceId{1}, Budget{},
                           layout, mode});
    const ModelId model = Take<BuildMirrors>().at(0).model;
    Feed(MirrorsBuilt{model, absl::OkStatus(), layout.span_bytes});
    effects.clear();
    return model;
  }

  RequestId Activate(const std::string& name, SessionId session = {}, absl::Time deadline = absl::InfiniteFuture()) {
    const RequestId request{next_request_++};
    Feed(ActivateRequested{.request = request, .name = name, .session = session, .deadline = deadline});
    return request;
  }
  RequestId Deactivate(const std::string& name, absl::Duration drain = absl::ZeroDuration()) {
    const RequestId request{next_request_++};
    Feed(DeactivateRequested{request, name, drain});
    return request;
  }
  RequestId BeginPhase(SessionId session, LeaseId lease, const std::string& component,
                       absl::Time deadline = absl::InfiniteFuture()) {
    const RequestId request{next_request_++};
    Feed(BeginPhaseRequested{request, session, lease, component, deadline});
    return request;
  }
  RequestId EndPhase(SessionId session, LeaseId lease, PhaseId phase) {
    const RequestId request{next_request_++};
    Feed(EndPhaseRequested{request, session, lease, phase});
    return request;
  }
  RequestId NextRequest() { return RequestId{next_request_++}; }

  // Answers a MeasureDevice with what is mapped now.
  void Measured(uint64_t others_bytes = 0, std::vector<LeaseId> in_use = {}) {
    uint64_t mapped_bytes = 0;
    for (const auto& [model, bytes] : mapped_bytes_) mapped_bytes += bytes;
    Feed(DeviceMeasured{.device = DeviceId{1},
                        .total_bytes = total_bytes_,
                        .free_bytes = total_bytes_ - mapped_bytes - others_bytes,
                        .broker_bytes = mapped_bytes,
                        .leases_in_use = std::move(in_use)});
  }
  // Answers a RealizePlan for `model` the good way.
  void Realized(ModelId model) {
    const Layout& layout = arbiter_.records().models.at(model).layout;
    const RealizePlan effect = Take<RealizePlan>().at(0);
    const uint64_t priced_bytes = Price(layout, effect.plan);
    const uint64_t before_bytes = std::exchange(mapped_bytes_[model], priced_bytes);
    std::vector<GiverEmptied> givers;
    for (ModelId giver : effect.givers) {
      mapped_bytes_[giver] = 0;
      givers.push_back({.model = giver});
    }
    Feed(PlanRealized{.model = model,
                      .device_bytes = priced_bytes,
                      .copied_bytes = priced_bytes,
                      .verified_cells = layout.cells.size(),
                      .unmapped_bytes = priced_bytes > 0 ? 0 : before_bytes,
                      .pooled_bytes = priced_bytes > 0 ? 0 : before_bytes,
                      .freed_bytes = 0,
                      .givers = std::move(givers)});
  }
  // Activation from request to reply, with room.
  void BringOn(const std::string& name, ModelId model, SessionId session = {}) {
    Activate(name, session);
    Measured();
    Realized(model);
  }
  SessionId Open(uint64_t number) {
    const SessionId session{number};
    Feed(SessionOpened{session, static_cast<int64_t>(1000 + number), 0, "client"});
    return session;
  }
  // The one lease that was granted; its cells are mapped.
  LeaseId Mapped() {
    const LeaseId lease = Take<GrantLease>().at(0).lease;
    Feed(LeaseMapped{lease, Take<SendCells>().at(0).generation});
    return lease;
  }

  Reply OnlyReply() {
    std::vector<Reply> replies = Take<Reply>();
    if (replies.size() != 1) throw std::runtime_error("there are " + std::to_string(replies.size()) + " replies");
    return replies.front();
  }
  const ModelRecord& model(ModelId id) const { return arbiter_.records().models.at(id); }
  const Arbiter& arbiter() const { return arbiter_; }
  absl::Time now() const { return now_; }

  static LayoutComponent ComponentOf(const std::string& name, uint64_t bytes) {
    LayoutComponent component{.name = name};
    component.tensors = {{.name = "w", .dtype = DType::kU8, .shape = {bytes}, .bytes = bytes}};
    return component;
  }
  static Layout LayoutOf(uint64_t bytes) {
    return *MakeLayout({ComponentOf("model", bytes)}, kMinCellBytes, kMinCellBytes);
  }

  std::vector<Effect> effects;

 private:
  static ArbiterOptions Options(uint64_t total_bytes, absl::Duration pool_idle) {
    ArbiterOptions options;
    options.pool_idle = pool_idle;
    options.devices = {{.id = DeviceId{1}, .uuid = "GPU-test", .budget_bytes = total_bytes}};
    return options;
  }

  const uint64_t total_bytes_;
  Arbiter arbiter_;
  absl::Time now_ = absl::UnixEpoch();
  std::map<ModelId, uint64_t> mapped_bytes_;
  uint64_t next_request_ = 1;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_ARBITER_RIG_H_
