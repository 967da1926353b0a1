// SPDX-License-Identifier: Apache-2.0
//
// The daemon without its threads, sockets and disk: the arbiter, what a device loop does (GpuMemory), and clients with
// use words and mappings of their own, all on the simulated driver and stepped by hand. Whoever owns the rig decides
// what happens next: a piece of device work, an answer that reaches the core, a packet that reaches a client, time.
// So every order is possible and none is left to chance. Time is virtual.
//
// What the daemon calls goes through FaultDriver's table; what clients and the rig itself ask goes past it.
#ifndef RESIDENCY_TESTS_CORE_RIG_H_
#define RESIDENCY_TESTS_CORE_RIG_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "daemon/arbiter.h"
#include "daemon/gpu_memory.h"
#include "mechanisms/held_cells.h"
#include "mechanisms/use_word.h"
#include "tests/fault_driver.h"

namespace residency {

// Bytes that stand for the weights on disk, page-locked as a mirror's are.
class RigCheckpoint {
 public:
  // Components "part0", "part1", ... with one tensor of `component_bytes` each; the content follows from `seed`.
  RigCheckpoint(std::string name, const std::vector<uint64_t>& component_bytes, uint64_t cell_bytes, uint64_t seed,
                ModelMode mode = ModelMode::kHeld);
  const std::string& name() const { return name_; }
  ModelMode mode() const { return mode_; }
  const Layout& layout() const { return layout_; }
  const std::vector<const Source*>& sources() const { return sources_; }
  const std::byte* CellData(uint32_t cell) const { return bytes_.data() + layout_.cells[cell].device_offset; }
  std::span<std::byte> bytes() { return bytes_; }

 private:
  class ComponentSource;
  const std::string name_;
  const ModelMode mode_;
  Layout layout_;
  std::vector<std::byte> bytes_;
  std::vector<uint64_t> digests_;
  std::vector<std::unique_ptr<Source>> components_;
  std::vector<const Source*> sources_;
};

class CoreRig {
 public:
  // One card, of which the broker may hold `budget_bytes`. The checkpoints are what can be registered, by their names.
  // Copies go in pieces of `piece_bytes`: the smaller, the more cells are sent to clients while others are filled.
  CoreRig(uint64_t budget_bytes, std::vector<RigCheckpoint*> checkpoints, uint64_t piece_bytes = 2 * kMiB);
  // Everything must have been unloaded, see CheckEmpty; else it is kept for the process's life.
  ~CoreRig();
  CoreRig(const CoreRig&) = delete;
  CoreRig& operator=(const CoreRig&) = delete;

  // ---- Requests. The id is for the reply. ----
  RequestId Register(const std::string& name);
  RequestId Unload(const std::string& name);
  RequestId Activate(const std::string& name, SessionId session = {},
                     absl::Duration deadline = absl::InfiniteDuration());
  RequestId Deactivate(const std::string& name, absl::Duration drain = absl::ZeroDuration());
  RequestId Verify(const std::string& name);
  RequestId AskToTrim();
  RequestId ReleaseLease(SessionId session, LeaseId lease);
  RequestId BeginPhase(SessionId session, LeaseId lease, const std::string& component,
                       absl::Duration deadline = absl::InfiniteDuration());
  RequestId EndPhase(SessionId session, LeaseId lease, PhaseId phase);
  void Cancel(RequestId request);
  // nullptr: not answered yet.
  const Reply* reply(RequestId request) const;
  // In the order asked.
  std::vector<RequestId> outstanding() const;

  // ---- What can happen next. Each says whether there was anything to do. ----
  bool WorkDevice();     // one piece of device work, in order
  bool WorkLoader();     // a model's bytes are there, or most of them
  bool DeliverAnswer();  // of device or loader to the core
  bool DeliverPacket(SessionId to);
  bool DeliverEvent(SessionId from);
  bool WorkClient(SessionId client);  // it lets go of the rest of a lease's cells, of which it has let go some
  // Moves time, to the next timer at most, and fires it where it is reached.
  bool Advance(absl::Duration most);
  // All of it but time, until nothing is left.
  void Drain();
  // From now on every other model that is read may be activated while its last bytes are missing.
  void ReadEarly() { reads_early_ = true; }
  // The next reading that ends fails in the end.
  void FailNextReading() { next_reading_fails_ = true; }
  // Whether only time, a client or a request can make anything happen.
  bool quiet() const;

  // ---- Clients. ----
  SessionId Connect();
  // The process dies: its mappings are gone at once, what it wrote may be read before (`heard`) or not.
  void Kill(SessionId session, bool heard = true);
  // It closes the channel and keeps what it has mapped.
  void HangUp(SessionId session);
  // A user goes in, where the word is open.
  bool Enter(SessionId session, LeaseId lease);
  void Leave(SessionId session, LeaseId lease);
  // The process does nothing more, as under SIGSTOP, or goes on.
  void Pause(SessionId session, bool paused) { clients_.at(session).paused = paused; }
  // Whether its next generation is one that it fails to map.
  void FailNextMapping(SessionId session);

  struct ClientCell {
    CellMemory memory;
    uint64_t inode = 0;
  };
  struct ClientLease {
    LeaseId id;
    ModelId model;
    const RigCheckpoint* checkpoint = nullptr;
    std::optional<UseWordMapping> page;
    AddressRange span;
    std::map<uint32_t, ClientCell> cells;
    uint64_t generation = 0;
    bool open = false;  // all cells of the generation came
    int uses = 0;
    bool revoke_pending = false;
    bool releasing = false;  // has let some cells go, and will the others
  };
  struct Packet {
    enum class Kind { kGranted, kCells, kRevoke, kEnded } kind;
    LeaseId lease;
    uint64_t generation = 0;
    ModelId model;
    const RigCheckpoint* checkpoint = nullptr;
    UniqueFd page;
    std::vector<CellToSend> cells;
    bool last = false;
  };
  struct Client {
    std::deque<Packet> inbox;
    std::deque<Event> outbox;
    std::map<LeaseId, ClientLease> leases;
    bool hung_up = false;  // closed its channel, though alive
    bool dead = false;     // events may still be on their way
    bool fails_next = false;
    bool paused = false;
  };
  const std::map<SessionId, Client>& clients() const { return clients_; }

  struct LiveModel {
    RigCheckpoint* checkpoint = nullptr;
    std::unique_ptr<Arena> arena;
    Plan plan;  // the one realized last
    bool cancelled = false;
    enum class Reading { kUnder, kNearly, kEnded } reading = Reading::kUnder;
    absl::Status failed;                           // of a reading that had come so far that a fill could begin
    std::vector<std::unique_ptr<Source>> flowing;  // what such a fill copies from
  };
  const std::map<ModelId, LiveModel>& models() const { return models_; }
  const ModelRecord* FindModel(const std::string& name) const;

  // ---- The truth, asked from the driver past the daemon. Each is empty, or says what is wrong. ----
  // Cheap enough for every step.
  std::string CheckOwners();
  // A few words of every cell that anybody may read, or, with `all`, each byte of them.
  std::string CheckBytes(bool all, uint64_t random);
  // Nothing is on the card but what was there when the rig began, once the pool is trimmed.
  std::string CheckEmpty();
  // Overwrites a word of a resident cell, as a stray write would.
  void Scribble(ModelId model, uint32_t cell);
  void Trim() { memory_->Trim(); }

  const Arbiter& arbiter() const { return *arbiter_; }
  const Device& device() const { return *truth_; }
  absl::Time now() const { return now_; }
  uint64_t events() const { return events_fed_; }
  uint64_t answered() const { return replies_.size(); }
  uint64_t realized() const { return realized_; }
  uint64_t realized_early() const { return realized_early_; }    // of them, that were told before the reading ended
  uint64_t readings_failed() const { return readings_failed_; }  // under such a fill
  uint64_t mapped_by_clients() const { return mapped_by_clients_; }
  // Swaps that were given up while a client had cells of the model that was to go.
  uint64_t hindered() const { return hindered_; }
  uint64_t early_cells() const { return early_cells_; }

 private:
  struct DaemonLease {
    SessionId session;
    std::optional<UseWordMapping> page;
    uint64_t generation = 0;  // sent last, as are its `cells`
    std::set<uint32_t> cells;
    uint64_t revoked_generation = 0;
  };
  using Answer = std::function<Event()>;
  struct DeviceWork {
    std::function<Answer()> work;
    std::function<bool()> waits;  // for a client that is to let cells go, or bytes that are still to come; may be empty
  };

  RequestId NextRequest();
  void Feed(const Event& event);
  void Do(const Reply& effect);
  void Do(const BuildMirrors& effect);
  void Do(const CancelMirrors& effect);
  void Do(const JoinMirrors&) {}
  void Do(const DropModel& effect);
  void Do(const MeasureDevice& effect);
  void Do(const RealizePlan& effect);
  void Do(const CancelRealize&) { realizing_.request_stop(); }
  void Do(const VerifyCells& effect);
  void Do(const TrimPool& effect);
  void Do(const GrantLease& effect);
  void Do(const SendCells& effect);
  void Do(const CloseUseWords& effect);
  void Do(const ReopenUseWords& effect);
  void Do(const CloseAndRevoke& effect);
  void Do(const RevokeLease& effect);
  void Do(const EndLease& effect);
  void Do(const SetTimer& effect);

  void PushCells(const CellReader& reader, const std::vector<CellToSend>& cells, bool last);
  void NoteInodes(const LiveModel& model, const std::vector<CellToSend>& cells);
  void OnCells(Client& client, ClientLease& lease, Packet packet);
  void TryTake(Client& client, ClientLease& lease);
  std::shared_ptr<HeldCells> HeldOf(ModelId giver) const;
  void UnmapCell(const ClientLease& lease, uint32_t cell);
  void LetGo(ClientLease& lease);
  UseWord Word(const ClientLease& lease) const { return lease.page->word(-1); }
  Client* ClientOf(LeaseId lease);
  uint64_t InodeOf(CUmemGenericAllocationHandle handle) const;

  const std::vector<RigCheckpoint*> checkpoints_;
  std::unique_ptr<Device> truth_;
  std::unique_ptr<GpuMemory> memory_;
  std::vector<HostRegistration> pins_;
  uint64_t free_at_start_bytes_ = 0;
  size_t ranges_at_start_ = 0;
  std::unique_ptr<Arbiter> arbiter_;
  absl::Time now_ = absl::UnixEpoch();
  std::map<ModelId, LiveModel> models_;
  std::map<RequestId, RigCheckpoint*> registering_;
  void Work(std::function<Answer()> work, std::function<bool()> waits = {});
  void EndReading(ModelId id);
  std::deque<DeviceWork> device_work_;
  std::stop_source realizing_;                  // of the last RealizePlan
  std::map<RequestId, uint64_t> phases_asked_;  // by which so many faults had been hit
  std::deque<std::function<Answer()>> loader_work_;
  std::deque<Answer> answers_;
  std::map<LeaseId, DaemonLease> daemon_leases_;
  std::map<SessionId, Client> clients_;
  std::map<TimerId, absl::Time> timers_;
  std::map<RequestId, Reply> replies_;
  std::set<RequestId> asked_;
  std::map<CUmemGenericAllocationHandle, uint64_t> inodes_;  // of cells that were exported
  std::string complaint_;                                    // found while an effect was carried out
  std::deque<Event> events_;
  bool feeding_ = false;
  uint64_t next_request_ = 1;
  uint64_t next_session_ = 1;
  uint64_t events_fed_ = 0;
  uint64_t realized_ = 0;
  uint64_t realized_early_ = 0;
  uint64_t readings_failed_ = 0;
  uint64_t readings_ = 0;
  bool reads_early_ = false;
  bool next_reading_fails_ = false;
  uint64_t mapped_by_clients_ = 0;
  uint64_t early_cells_ = 0;
  uint64_t hindered_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_CORE_RIG_H_
