// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/page_channel_rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <utility>

#include "absl/strings/ascii.h"
#include "mechanisms/refusal.h"
#include "tests/fuzz/fuzz_input.h"

namespace residency {
namespace {

PeerIdentity Self() { return {getpid(), getuid(), getgid()}; }

// One for all inputs, as a thread takes longer to start than an input to run.
Loop& TheLoop() {
  static Loop* const loop = Loop::Start("fuzz")->release();
  return *loop;
}

// What every cell's descriptor is a duplicate of.
int CellFile() {
  static const int file = memfd_create("cell", MFD_CLOEXEC);
  return file;
}

}  // namespace

size_t CountDescriptors() {
  DIR* const directory = opendir("/proc/self/fd");
  Check(directory != nullptr, "opendir");
  size_t count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

PageChannelRig::PageChannelRig(OnLet on_let) : on_let_(on_let) {
  Check(CellFile() >= 0, "memfd_create");
  OnLoop([this] {
    sessions_ = std::make_unique<Sessions>(TheLoop(), DaemonIdentity{"epoch", "sim", "/sim"},
                                           [this](const Event& event) { Tell(event); });
  });
}

void PageChannelRig::Stop() {
  OnLoop([this] { sessions_.reset(); });
}

void PageChannelRig::OnLoop(const std::function<void()>& task) {
  std::promise<void> done;
  TheLoop().Post([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

UniqueFd PageChannelRig::Connect() {
  int ends[2];
  Check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
  OnLoop([&] { sessions_->Add(UniqueFd(ends[0]), Self()); });
  return UniqueFd(ends[1]);
}

void PageChannelRig::Settle(int socket) {
  int waiting = 0;
  do {
    OnLoop([] {});
    Check(ioctl(socket, SIOCOUTQ, &waiting) == 0, "SIOCOUTQ");
  } while (waiting != 0);
  // The last packet is taken, and perhaps being handled; and what that posted comes after it.
  OnLoop([] {});
  OnLoop([] {});
}

// ---- Orders. ----

bool PageChannelRig::Grant(uint64_t lease, const std::string& wire_id) {
  const auto session = sessions_->Find(wire_id, Self());
  if (!session.ok() || !granted_.insert(lease).second) return false;
  v1::LeaseGranted grant;
  grant.set_lease_id(lease);
  grant.set_model("m");
  leases_[{lease}].session = *session;
  sessions_->GrantLease(*session, grant);
  return true;
}

void PageChannelRig::SendCells(uint64_t id, uint32_t count) {
  const auto lease = leases_.find({id});
  if (lease == leases_.end()) return;
  if (lease->second.state != State::kGranted && lease->second.state != State::kLet) return;
  lease->second.state = State::kGranting;
  lease->second.generation += 1;
  lease->second.cells = count;
  std::vector<CellToSend> cells;
  for (uint32_t i = 0; i < count; ++i) {
    cells.push_back(
        {i, i * uint64_t{4096}, 4096, std::make_shared<const UniqueFd>(fcntl(CellFile(), F_DUPFD_CLOEXEC, 0))});
  }
  sessions_->SendCells({id}, lease->second.generation, cells);
}

void PageChannelRig::Revoke(uint64_t id) {
  const auto lease = leases_.find({id});
  if (lease == leases_.end() || lease->second.state != State::kLive) return;
  lease->second.state = State::kRevoking;
  sessions_->Revoke({id}, lease->second.generation);
}

void PageChannelRig::End(uint64_t id, const std::string& reason, const std::string& message) {
  if (leases_.erase({id}) != 0) sessions_->EndLease({id}, reason, message);
}

void PageChannelRig::CloseAndReopen(uint64_t lease) {
  UseWord* const word = sessions_->Word({lease});
  if (word == nullptr) return;
  word->CloseIfIdle();
  word->Close();
  word->Cancel();
}

bool PageChannelRig::IsOpen(const std::string& wire_id) { return sessions_->Find(wire_id, Self()).ok(); }

bool PageChannelRig::IsLive(uint64_t lease) {
  const auto found = leases_.find({lease});
  return found != leases_.end() && found->second.state == State::kLive &&
         sessions_->mapped_bytes({lease}) == uint64_t{found->second.cells} * 4096;
}

bool PageChannelRig::WasLet(uint64_t lease) {
  const auto found = leases_.find({lease});
  return found == leases_.end() ? on_let_ == OnLet::kEnd : found->second.was_let;
}

// ---- Events. ----

void PageChannelRig::Tell(const Event& event) {
  std::visit([this](const auto& told) { On(told); }, event);
}

template <typename T>
void PageChannelRig::On(const T&) {
  Check(false, "an event that is none of the page channel's");
}

PageChannelRig::Lease& PageChannelRig::Known(LeaseId id) {
  const auto lease = leases_.find(id);
  Check(lease != leases_.end(), "an event about a lease that was not granted, or has ended");
  const auto session = open_.find(lease->second.session);
  Check(session != open_.end() && !session->second.hung_up, "an event from a session that is over");
  return lease->second;
}

void PageChannelRig::On(const SessionOpened& event) {
  Check(open_.emplace(event.session, Session{}).second, "a session opens once");
  Check(event.pid == getpid() && event.uid == getuid(), "a session is its process's");
  Check(event.client.size() <= 64, "a name is short");
  for (const char c : event.client) Check(absl::ascii_isprint(static_cast<unsigned char>(c)), "a name can be printed");
}

void PageChannelRig::On(const SessionHungUp& event) {
  const auto session = open_.find(event.session);
  Check(session != open_.end() && !std::exchange(session->second.hung_up, true), "an open session hangs up, once");
  // As the core: those without cells end at once.
  std::vector<uint64_t> empty;
  for (const auto& [id, lease] : leases_) {
    const bool holds = lease.state != State::kGranted && lease.state != State::kLet;
    if (lease.session == event.session && !holds) empty.push_back(id.value);
  }
  for (const uint64_t lease : empty) End(lease, "SESSION_ENDED");
}

void PageChannelRig::On(const SessionEnded& event) {
  Check(open_.erase(event.session) == 1, "an open session ends, once");
  std::vector<uint64_t> held;
  for (const auto& [id, lease] : leases_) {
    if (lease.session == event.session) held.push_back(id.value);
  }
  for (const uint64_t lease : held) End(lease, "SESSION_ENDED");
}

void PageChannelRig::On(const LeaseMapped& event) {
  Lease& lease = Known(event.lease);
  Check(lease.state == State::kGranting && event.generation == lease.generation,
        "a lease is mapped once for each generation that was sent");
  lease.state = State::kLive;
}

void PageChannelRig::On(const LeaseReleasing& event) {
  const Lease& lease = Known(event.lease);
  Check(lease.generation != 0 && event.generation == lease.generation, "what is being released was sent");
  Check(lease.state == State::kLive || lease.state == State::kRevoking, "what is being released is held as a whole");
  const uint64_t left_bytes = sessions_->mapped_bytes(event.lease);
  Check(left_bytes > 0 && left_bytes < uint64_t{lease.cells} * 4096, "of what is being released some is left");
}

void PageChannelRig::On(const LeaseReleased& event) {
  Lease& lease = Known(event.lease);
  Check(lease.generation != 0 && event.generation == lease.generation, "what is released was sent");
  Check(lease.state != State::kGranting, "what is released was all acknowledged");
  // Said again after a revocation that was taken back.
  if (std::exchange(lease.state, State::kLet) == State::kLet) return;
  lease.was_let = true;
  if (on_let_ == OnLet::kEnd) End(event.lease.value, "RELEASED");
  if (on_let_ == OnLet::kSendAgain && lease.generation < 3) SendCells(event.lease.value, lease.cells);
}

void PageChannelRig::On(const LeaseFailed& event) {
  Known(event.lease);
  Check(event.by_client && !event.status.ok() && !ReasonOf(event.status).empty(), "a failure has the client's reason");
  End(event.lease.value, ReasonOf(event.status), std::string(event.status.message()));
}

}  // namespace residency
